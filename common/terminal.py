"""What is shown on a terminal: tables, and how far something is."""


def progress(items, what, delay=0):
    """The items, with a bar if there is a terminal and tqdm is installed. what: begins the bar; '': none.
    delay: seconds before it is shown"""
    try:
        from tqdm import tqdm
    except ImportError:                                         # README's first command does without
        return items
    return tqdm(items, what, disable=None if what else True, delay=delay)


def table(lines):
    """Print a list of dicts with the same keys as a table. None is shown as a dash."""
    def as_text(x):
        if x is None:
            return '-'
        if isinstance(x, str):
            return x
        if isinstance(x, int) or abs(x) >= 1e4:
            return f'{x:,.0f}'
        return f'{x:.4g}'
    columns = []
    for name in lines[0]:
        cells = [name] + [as_text(line[name]) for line in lines]
        width = max(map(len, cells))
        side = '>' if columns else '<'
        columns.append([f'{cell:{side}{width}}' for cell in cells])
    for cells in zip(*columns):
        print('  '.join(cells))
