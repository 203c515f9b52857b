"""The command line: a field of a dataclass is a flag, with its type, default, help, choices and range.

    @dataclass
    class Args:
        steps: int = flag(100, 'optimiser steps', low=1)

    given, = parse(['--steps=3'], 'the docstring', Args)        # {'steps': 3}: only what was given
    args = Args(**given)

What a file says is held against the same fields (`typed`). Every mistake is a ValueError that says what was
given and what is expected; a script tells it in one line (`prepare.script`).
"""
import argparse
import contextlib
import dataclasses
import difflib
import itertools
import math
import os
import re
import sys
import textwrap


def flag(default, help, choices=None, low=-math.inf, high=math.inf, of=(), path=False):
    """A dataclass field that is also a command line flag, see `parse`; without a help it is none. low and
    high are the smallest and the largest number allowed. of: the rules that use it, if not all do; the layers
    of these rules are built with it (model.Mixer). path: ~ stands for the home folder"""
    metadata = {'help': help, 'choices': choices, 'range': (low, high), 'of': of, 'path': path}
    return dataclasses.field(default=default, metadata=metadata)


def known(default, low=-math.inf, high=math.inf, of=()):
    """A field with a range that is no flag: its value comes from the data or a file, see `typed`."""
    return flag(default, '', None, low, high, of)


def refuse(mistakes):
    """Raise ValueError for the first mistake. mistakes yields pairs: whether the mistake was made, and a
    sentence that explains it. A later test may assume that the earlier mistakes were not made."""
    for made, why in mistakes:
        if made:
            raise ValueError(why)


def plural(n, what):
    """1 token, 2,000 tokens"""
    return f'{n:,} {what}{"s" * (n != 1)}'


def briefly(words):
    """delta, softmax; 30 x softmax: a list of words, without repeating what stands side by side"""
    runs = [(word, len(list(run))) for word, run in itertools.groupby(words)]
    return ', '.join(word if n == 1 else f'{n} x {word}' for word, n in runs)


# ---- what a field accepts ----------------------------------------------------------------------------------
EXPECTED = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text',
            list: 'a list of numbers', dict: 'an object'}
BOOLEANS = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}


ELSEWHERE = {           # flags of other tools, or of our other scripts: ours
    '--model': '--init --from', '--init': '--from', '--from': '--init', '--text': '--prompt',
    '--epochs': '--steps', '--learning_rate': '--lr', '--max_new_tokens': '--tokens',
    '--row': '--block_size', '--block_size': '--row'}


def hint(word, words):
    """'; did you mean this?' with what the word begins, another tool's name for it, or the most similar word;
    or nothing."""
    begun = [name for name in words if word and name.startswith(word)]
    known = [name for name in ELSEWHERE.get(word, '').split() if name in words]
    for near in [*begun, *known, *difflib.get_close_matches(word, words, 1)]:
        return f'; did you mean {near}?'
    return ''


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


def typed(cls, raw, where):
    """Make a dataclass from a dict that was read from a file. ValueError, beginning with `where`, if a field
    is missing, unknown, of another type, out of range or not finite, or if fields contradict each other."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(raw, dict):
        raise ValueError(f'{where}: {raw!r:.60} says nothing of {", ".join(fields)}')       # noqa: TRY004
    for name in sorted(fields.keys() - raw.keys()):
        raise ValueError(f'{where}: {name} is missing')
    for name in sorted(raw.keys() - fields.keys()):
        raise ValueError(f'{where}: {name} is unknown')
    for name, value in raw.items():
        if not fits(fields[name], value):
            raise ValueError(f'{where}: {name} is {value!r:.60}, {expected(fields[name])}')
    try:
        return cls(**raw)
    except ValueError as e:
        raise ValueError(f'{where}: {e}') from None


# ---- a command line ----------------------------------------------------------------------------------------
def from_home(paths):
    """A path, or several separated by : or , with the home folder in place of ~"""
    return re.sub('(?<![^:,])~[^/:,]*', lambda home: os.path.expanduser(home[0]), paths)


def value_of(flag, text, field):
    """The text after a flag, converted to its type. ValueError says what is expected."""
    choices = field.metadata['choices']
    if choices and not fits(field, text):
        raise ValueError(f'{flag}={text}: choose from {", ".join(choices)}{hint(text, choices)}')
    if field.type is str:
        if field.default and not text:              # if empty has a meaning, it is the default
            raise ValueError(f'{flag}=: expected some text, such as {field.default}')
        if field.metadata['path']:
            return from_home(text)
        return text
    with contextlib.suppress(KeyError, ValueError):
        if field.type is bool:
            return BOOLEANS[text.lower()]
        value = field.type(text)
        if fits(field, value):
            return value
    raise ValueError(f'{flag}={text}: {expected(field)}')


def print_help(doc, fields, first):
    """Print a screen: what a script does, its commands, the flags in `first`. Then the rest of its docstring,
    and the other flags."""
    paragraphs = (doc or '').strip('\n').split('\n\n')      # python -OO removes docstrings
    often = [f'--{name}' for name in first.split()]
    print_parts(paragraphs[:2], {flag: fields[flag] for flag in often})
    print()
    print_parts(paragraphs[2:], {flag: field for flag, field in fields.items() if flag not in often})


def print_parts(paragraphs, fields):
    """Print paragraphs, then each flag: default, help, choices."""
    print('\n\n'.join([*paragraphs, '']), end='')
    for flag, field in fields.items():
        default = '' if field.default is None else field.default
        about = field.metadata['help']
        if field.metadata['choices']:
            about += f' [{", ".join(field.metadata["choices"])}]'
        name = f'  {flag}={default}'.ljust(24)
        print(textwrap.fill(f'{name} {about}', 110, subsequent_indent=' ' * 25, break_on_hyphens=False,
                            break_long_words=False))


def parse(argv, doc, *classes, first=''):
    """Read --key=value, --key value, or --key for true -> per dataclass, a dict of the flags that were given.
    ValueError if a flag is unknown, given twice, or its value does not fit. --help exits; it begins with the
    flags in `first`."""
    fields = {}
    for field in itertools.chain(*map(dataclasses.fields, classes)):
        if field.metadata.get('help'):
            fields['--' + field.name.rstrip('_')] = field       # from_ is --from
    if '--help' in argv or '-h' in argv:
        print_help(doc, fields, first)
        sys.exit(0)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag, field in fields.items():
        alone = {'nargs': '?', 'const': 'true'} if field.type is bool else {}
        parser.add_argument(flag, dest=field.name, action='append', **alone)

    def error(why):
        raise ValueError(why.removeprefix('argument '))
    parser.error = error
    texts, unknown = parser.parse_known_args(argv)
    for word in argv:           # argparse takes a flag with blanks in its text for the text of the one before
        name = word.partition('=')[0]
        if word in unknown or (re.match(r'--\w+=', word) and name not in fields):
            raise ValueError(f'{word}: no such flag{hint(name, fields)}; --help lists them')
    given = {}
    for flag, field in fields.items():
        for text in getattr(texts, field.name, []):
            if isinstance(text, list):              # what argparse makes of --prompt=--
                text = '--'
            if field.name in given:
                raise ValueError(f'{flag} is given twice')
            given[field.name] = value_of(flag, text, field)
    return [{field.name: given[field.name] for field in dataclasses.fields(c) if field.name in given}
            for c in classes]
