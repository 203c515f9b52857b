"""The command line: a field of a dataclass is a flag, with its type, default, help, choices and range.

    @dataclass
    class Args:
        steps: int = flag(100, 'optimiser steps', low=1)

    given, = parse(['--steps=3'], 'the docstring', Args)        # {'steps': 3}: only what was given
    args = Args(**given)

What a file says is held against the same fields (`typed`). Every mistake is a ValueError that says what was
given and what is expected; a script tells it in one line (`errors.script`).
"""
import argparse
import contextlib
import dataclasses
import difflib
import itertools
import math
import os
import re
from functools import partial


def flag(default, help, choices=None, low=-math.inf, high=math.inf, of='', path=False, later=False):
    """A dataclass field that is also a command line flag, see `parse`; without a help it is none. low and
    high are the smallest and the largest number allowed. of: the property of rules that use it ('erases'), if
    not all do. path: ~ stands for the home folder. later: files of ours
    from before it was there lack it, and mean the default"""
    metadata = {'help': help, 'choices': choices, 'range': (low, high), 'of': of, 'path': path,
                'later': later}
    return dataclasses.field(default=default, metadata=metadata)


def known(default, low=-math.inf, high=math.inf, of='', later=False):
    """A field with a range that is no flag: its value comes from the data or a file, see `typed`."""
    return flag(default, '', None, low, high, of, later=later)


def subset(cls, *names, **own):
    """A dataclass with some flags of the dataclass cls and some of its own, by name."""
    fields = [(name, str, field) for name, field in own.items()]
    for field in dataclasses.fields(cls):
        if field.name in names:
            fields.append((field.name, field.type, field))
    return dataclasses.make_dataclass('Subset', fields)


def refuse(mistakes):
    """Raise ValueError for the first mistake. mistakes yields pairs: whether the mistake was made, and a
    sentence that explains it. A later test may assume that the earlier mistakes were not made."""
    for made, why in mistakes:
        if made:
            raise ValueError(why)


def plural(n, what):
    """1 token, 2,000 tokens"""
    return f'{n:,} {what}{"s" * (n != 1)}'


def by_layer(layers, rule, n):
    """The rule of each of n layers, a list: the pattern --layers, or --rule alone, again and again"""
    pattern = (layers or rule).replace(' ', '').split(',')
    return [pattern[i % len(pattern)] for i in range(n)]


def briefly(words):
    """delta, softmax; 30 x softmax: a list of words, without repeating what stands side by side"""
    runs = [(word, len(list(run))) for word, run in itertools.groupby(words)]
    return ', '.join(word if n == 1 else f'{n} x {word}' for word, n in runs)


# ---- what a field accepts ----------------------------------------------------------------------------------
EXPECTED = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text',
            list: 'a list of numbers'}
BOOLEANS = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}


def expected(field):
    """What a dataclass field accepts, in words."""
    choices = field.metadata.get('choices')
    if choices:
        return f'one of {", ".join(choices)}'
    accepted = f'expected {EXPECTED[field.type]}'
    low, high = field.metadata.get('range', (-math.inf, math.inf))
    if low > -math.inf:
        accepted += f', at least {low:,}'
    if high < math.inf:
        accepted += f', at most {high:,}'
    return accepted


def fits(field, value):
    """Whether a value fits the type, choices and range of a field. Infinite and NaN never do."""
    choices = field.metadata.get('choices')
    if choices:
        return value in choices or value == field.default
    if value is None:
        return field.default is None
    if field.type is list:
        return type(value) is list and all(type(x) is float and math.isfinite(x) for x in value)
    if type(value) is not field.type and (type(value), field.type) != (int, float):
        return False
    if field.type not in (int, float):
        return True
    low, high = field.metadata.get('range', (-math.inf, math.inf))
    return low <= value <= high and value < 2 ** 1000


def check_fields(config):
    """ValueError if a field of a dataclass has a value that does not fit it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not fits(field, value):
            raise ValueError(f'--{field.name}={value}: {expected(field)}')


def typed(cls, raw, where):
    """Make a dataclass from a dict that was read from a file of ours. ValueError, beginning with `where`, if
    it is of a version with other fields, or if its values do not fit."""
    fields = dataclasses.fields(cls)
    raw = {**{field.name: field.default for field in fields if field.metadata.get('later')}, **raw}
    others = raw.keys() ^ {field.name for field in fields}
    if others:
        raise ValueError(f'{where}: {", ".join(sorted(others))} is unknown, or is missing')
    try:
        return cls(**raw)
    except ValueError as e:
        raise ValueError(f'{where}: {e}') from None


# ---- a command line ----------------------------------------------------------------------------------------
ELSEWHERE = {           # flags of other tools, or of our other scripts: ours
    '--model': '--init --from', '--init': '--from', '--from': '--init', '--text': '--prompt',
    '--epochs': '--steps', '--learning_rate': '--lr', '--max_new_tokens': '--tokens',
    '--row': '--block_size', '--block_size': '--row'}


def hint(word, words):
    """'; did you mean this?' with what the word begins, another tool's name for it, or the most similar word;
    or nothing."""
    begun = [name for name in words if word and name.startswith(word)]
    elsewhere = [name for name in ELSEWHERE.get(word, '').split() if name in words]
    for near in [*begun, *elsewhere, *difflib.get_close_matches(word, words, 1)]:
        return f'; did you mean {near}?'
    return ''


def from_home(paths):
    """A path, or several separated by : or , with the home folder in place of ~"""
    return re.sub('(?<![^:,])~[^/:,]*', lambda home: os.path.expanduser(home[0]), paths)


def value_of(field, text):
    """The text after a flag, converted to its type. An error, which argparse tells, says what is expected."""
    choices = field.metadata['choices']
    if field.type is str and field.metadata['path']:
        text = from_home(text)
    with contextlib.suppress(KeyError, ValueError):
        value = BOOLEANS[text.lower()] if field.type is bool else field.type(text)
        means_nothing = value == '' and field.default           # an empty --out would be the root folder
        if fits(field, value) and not means_nothing:
            return value
    near = hint(text, choices) if choices else ''
    raise argparse.ArgumentTypeError(f'{text!r}: {expected(field)}{near}')


class Screen(argparse.RawDescriptionHelpFormatter):
    """--help, in which each flag stands with its default as one types it: --steps=100"""
    def __init__(self, prog):
        super().__init__(prog, max_help_position=25, width=110)

    def _format_action_invocation(self, action):
        if action.dest == 'help':
            return '-h, --help'
        return f'{action.option_strings[0]}={action.metavar}'


def parse(argv, doc, *classes, first='', more=None):
    """Read --key=value, --key value, or --key for true -> per dataclass, a dict of the flags that were given.
    ValueError if a flag is unknown or its value does not fit. --help exits. Its first screen is what the
    script does, its commands and the flags in `first`; then come the rest of its docstring and the other
    flags, those of a class with a title under that title. more(): further classes, which are asked for only
    if there is --help, or a flag that the others have not; then their dicts come, too."""
    ours = {f'--{field.name.rstrip("_")}' for c in classes for field in dataclasses.fields(c)}
    if more and any(word.partition('=')[0] not in ours for word in argv):
        classes = [*classes, *more()]
    what, commands, *rest = [*(doc or '').split('\n\n', 2), '', '']    # python -OO removes docstrings
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=f'{what}\n\n{commands}',
                                     argument_default=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=Screen, add_help=False)
    often = parser.add_argument_group('often needed')
    others = parser.add_argument_group('more', ''.join(rest))
    flags = {}
    group_of = {}
    for c in classes:
        title = getattr(c, 'title', '')
        group = parser.add_argument_group(title) if title else others
        for field in dataclasses.fields(c):
            if field.metadata.get('help'):
                name = f'--{field.name.rstrip("_")}'            # from_ is --from
                flags[name] = field
                group_of[name] = group
    order = [f'--{name}' for name in first.split()]
    for name in sorted(flags, key=lambda name: order.index(name) if name in order else len(order)):
        field = flags[name]
        about = field.metadata['help']
        if field.metadata['choices']:
            about += f' [{", ".join(field.metadata["choices"])}]'
        alone = {'nargs': '?', 'const': True} if field.type is bool else {}
        group = often if name in order else group_of[name]
        default = '' if field.default is None else str(field.default)
        group.add_argument(name, dest=field.name, type=partial(value_of, field), metavar=default,
                           help=about.replace('%', '%%'), **alone)

    others.add_argument('-h', '--help', action='help', help='show all this')

    def error(why):
        raise ValueError(why.removeprefix('argument '))
    parser.error = error
    known_flags, unknown = parser.parse_known_args(argv)
    given = vars(known_flags)
    for word in unknown:
        raise ValueError(f'{word}: no such flag{hint(word.partition("=")[0], flags)}; --help lists them')
    return [{field.name: given[field.name] for field in dataclasses.fields(c) if field.name in given}
            for c in classes]
