"""What a suite found: a table while it runs, then a CSV file and a picture.

matplotlib is imported only here, and only where there is something to plot.
"""
import csv
import itertools
import math

from common.terminal import table
from papers.suites import IN_PERCENT, Panel, column

FOR_THE_PICTURE = 'curve', 'query'          # parts of a table that are too long to print
LOGARITHMIC = (                             # columns with a log axis
    'T', 'us a token', 'state bytes', 'ms', 'MB', 'cached', 'more than full, %', 'tokens/s',
    'position', 'share', 'step', 'tokens a row', 'KL to teacher', 'weight')


def report_suite(args, suite):
    """Measure, print each line of the table as it comes, write and draw it."""
    rows = []

    def to_print():
        for row in suite.measure(args, suite):
            rows.append(row)
            if row.get('part') not in FOR_THE_PICTURE:
                yield row

    table(to_print())
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    with open(f'{args.out}/{suite.name}.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(suite.note.format_map(vars(args)))
    print(f'paper: {suite.source}')
    draw(args, suite, rows)


def draw(args, suite, measured):
    """Draw the suite's picture, if there is something to plot: its panels or, for commands, one per way."""
    panels = suite.panels
    if not panels:
        panels = [Panel('ours', 'form', way, way) for way in suite.ways]
    shown = [(panel, panel.shown(measured)) for panel in panels]
    shown = [(panel, rows) for panel, rows in shown if rows]
    n = len(shown)
    if n == 0:
        return
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.close('all')
    plt.style.use('tableau-colorblind10')
    marked = plt.rcParams['axes.prop_cycle'] + plt.cycler(marker=list('osD^vXP*<>'))   # for grey print
    rounds = plt.cycler(linestyle=['-', '--', ':', '-.'], fillstyle=['full', 'none', 'left', 'right'])
    looks = rounds * marked
    plt.rcParams.update({'font.size': 12, 'axes.prop_cycle': looks, 'axes.formatter.min_exponent': 3})
    figure, [axes] = plt.subplots(1, n, figsize=(7.5 * n, 4.5), squeeze=False, layout='constrained')
    forms = {}                      # in order
    for _, rows in shown:
        forms |= dict.fromkeys(column(rows, 'form'))
    labels = {'ours': suite.figure, 'form': '', 'T': 'tokens'}
    if labels['ours'] in IN_PERCENT:
        labels['ours'] += ', %'
    for (panel, rows), ax in zip(shown, axes):
        if panel.y == 'form':
            draw_ranges(ax, rows)
        else:
            draw_lines(ax, panel, rows, forms)
        ax.set(title=panel.title.format_map(vars(args)), xlabel=labels.get(panel.x, panel.x),
               ylabel=labels.get(panel.y, panel.y))
    path = f'{args.out}/{suite.name}.png'
    figure.savefig(path, dpi=110)
    print(f'picture: {path}')


def draw_lines(axes, panel, rows, forms):
    """Plot a line per form, in colours for colour-blind readers. Hollow points are the paper's. forms: those
    of all panels, so that a form looks the same in each panel"""
    if panel.x in LOGARITHMIC:
        axes.set_xscale('log', nonpositive='mask')
    if panel.y in LOGARITHMIC:
        axes.set_yscale('log', nonpositive='mask')
    for form in forms:
        points = [row for row in rows if row['form'] == form]
        x = column(points, panel.x)
        label = form if points else '_'                 # not in the legend
        apart = max(1, len(x) // 16)
        [line] = axes.plot(x, column(points, panel.y), label=label, markersize=5, markevery=apart)
        if panel.x == 'S':
            axes.plot(x, column(points, 'paper'), line.get_marker(), color=line.get_color(), fillstyle='none')
    axes.legend(loc='center left', bbox_to_anchor=(1, 0.5), fontsize=9, frameon=False)
    ticks = sorted(set(column(rows, panel.x)))
    if panel.x in LOGARITHMIC and len(ticks) <= 8:
        shown = [x for x, after in itertools.pairwise([*ticks, math.inf]) if after > 1.2 * x]
        axes.set_xticks(shown, [f'{t:,}' for t in shown])                   # closer labels overlap
        axes.set_xticks([], minor=True)


def draw_ranges(axes, rows):
    """Plot a bar per form: the range over seeds, with a point at the median."""
    forms = column(rows, 'form')
    axes.hlines(forms, column(rows, 'least'), column(rows, 'most'))
    axes.plot(column(rows, 'ours'), forms, 'o')
    axes.tick_params(axis='y', labelsize=9)
    axes.invert_yaxis()
