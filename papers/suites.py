"""What a suite is: what to measure, on which lines, and what its paper found.

    Suite('grid', 'rules x feature maps', runs, 'data seeds', lines=from_nothing({'sum': '--rule=sum'}),
          ways={'': Way('stdlib', steps=40)}, figure='bits per byte', source='a table of a paper')

Here are the parts of a suite. papers/harness.py has what measures, papers/report.py shows what was found.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

IN_PERCENT = 'accuracy', 'before', 'recovered', 'matthews', 'majority'
DELTA = '--rule=delta --beta_max=1'             # as in the papers; train.py's default is 2
ALWAYS = 'full out device threads seed'


class Panel(NamedTuple):
    """One plot: a line per form over x. If y is `form`, the median and range of each form along x."""
    x: str                          # a column of the table; so is y
    y: str
    title: str = ''                 # may contain flags: {heads}
    part: str = ''                  # which rows of the table

    def shown(self, rows):
        """The rows of a table that it shows."""
        return [row for row in rows if row.get('part', '') == self.part and self.y in row]


class Line(NamedTuple):
    """A line of a suite of commands: how its model is made."""
    flags: str = ''                 # of train.py, or of convert.py
    begins: str = 'from nothing'    # or from the line `softmax`, which is `converted` or only `trained on`
    distils: int = 0                # stage 1 of a conversion gets 1 / this of the steps; 0: there is none


class Way(NamedTuple):
    """How a suite of commands runs its lines: the data, the model, the number of steps."""
    data: str                       # '': the text of --data
    train: str = ''                 # flags of train.py
    steps: int = 0                  # if --steps is not given
    times: int = 1                  # multiplies the steps
    converts: bool = False          # all lines are converted from `softmax`, also those trained from nothing
    how: str = ''                   # more flags of lines that begin from `softmax`
    convert: str = ''               # more flags of convert.py
    more: float = 0.0               # their steps, as a share of the steps of `softmax`
    first: str = ''                 # the way whose softmax model it begins with
    full: bool | None = None        # True: only with --full; False: only without


@dataclass
class Suite:
    """What to measure, the flags, the plots, and what a paper found."""
    name: str
    about: str                      # for --help
    measure: Callable               # (args, suite): yields rows of the table
    flags: str                      # flags that it takes, besides ALWAYS
    quick: dict = field(default_factory=dict)       # their defaults in a quick run; `only` names lines
    full: dict = field(default_factory=dict)        # and in a full run
    lines: dict = field(default_factory=dict)       # form: flags of its command, or what `measure` takes
    always: tuple = ()              # lines that run whatever --only says
    ways: dict = field(default_factory=dict)        # for commands: name: Way
    figure: str = ''                # for commands: the key of their results that becomes `ours`
    beside: tuple = ()              # more keys that become columns
    from_checkpoint: Callable | None = None         # (args, result of a run, its model, meta) -> more results
    one: bool = False               # it takes only one of --lengths
    panels: tuple = ()
    note: str = ''
    source: str = ''                # paper, its table or figure, what it measured
    paper: dict = field(default_factory=dict)       # form: the paper's figure, or a dict by size or part


def from_nothing(table):
    """Lines that train.py trains, by their flags."""
    return {form: Line(flags) for form, flags in table.items()}


def conversions(table, distils=0):
    """Lines that convert.py makes of `softmax`, by their flags."""
    return {form: Line(flags, 'converted', distils) for form, flags in table.items()}


def over(sizes, *figures):
    """{size: figure}, from the first size on."""
    return dict(zip(sizes, figures))


def chosen(args, quick, full):
    """-> the value for a quick run or for a full one."""
    return full if args.full else quick


def only(args, table):
    """The lines that --only names; all without --only."""
    names = list(table)
    if args.only:
        names = [name.strip() for name in args.only.split(',')]
    for name in names:
        if name not in table:
            raise ValueError(f'--only={args.only}: no {name!r} here; choose from {", ".join(table)}')
    return {name: table[name] for name in names}


def column(rows, name):
    """What each row of a table, or each result, has under a name."""
    return [row[name] for row in rows]
