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
    """Print dicts as lines of a table, each when it comes, with a head where keys change. None is a dash."""
    def as_text(x):
        if x is None:
            return '-'
        if isinstance(x, str):
            return x
        if isinstance(x, int) or abs(x) >= 1e4:
            return f'{x:,.0f}'
        return f'{x:.4g}'
    head = []
    for line in lines:
        rows = [[as_text(x) for x in line.values()]]
        if list(line) != head:
            head = list(line)
            rows.insert(0, head)
        for texts in rows:
            cells = [f'{text:>{max(10, len(name))}}' for text, name in zip(texts, head)]
            print(f'{texts[0]:36} ', '  '.join(cells[1:]), flush=True)
