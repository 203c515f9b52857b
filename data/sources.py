"""Sets that are read from files, published ones and your own.

Each function takes paths and returns the training side, the validation side, and maybe a test side. That of
a text is its bytes, that of conversations a list of them. All others are (inputs, targets). Pictures are rows
of numbers, and have a class each. Sentences are texts in UTF-8, and have labels. The targets of pairs are
texts, the translations.
"""
import gzip
import json
import math
import os
import re
import sysconfig
import zipfile

import numpy as np

from common import files
from common.errors import of_package

# ---- texts -------------------------------------------------------------------------------------------------

def stdlib():
    """The .py files of the running Python. Fixed rules make figures comparable: take all regular *.py files
    outside the folders in `skip`; sort their relative paths (with "/") by code point; file i validates if
    i % 10 == 9; join the raw bytes without a separator."""
    root = sysconfig.get_paths()['stdlib']
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    paths = []
    for folder, dirs, names in os.walk(root):                   # does not follow links to folders
        dirs[:] = set(dirs) - skip                              # in place: os.walk goes on with this list
        for path in [os.path.join(folder, n) for n in names if n.endswith('.py')]:
            if os.path.isfile(path) and not os.path.islink(path):
                paths.append(os.path.relpath(path, root).replace(os.sep, '/'))
    texts = [files.read_file(os.path.join(root, p)) for p in sorted(paths)]
    [texts], [val] = every_tenth([texts])
    return b''.join(texts), b''.join(val)


def shakespeare(path):
    """The first 90 % of the characters train, as in nanoGPT. All are ASCII, so characters are bytes."""
    text = files.read_file(path)
    cut = int(len(text) * .9)
    return text[:cut], text[cut:]


def local_text(path):
    """The last 10 to 20 % validate. We cut at a line end or, if lines are long, between two characters."""
    text = files.read_file(path)
    files.as_utf8(text, path)
    latest = int(len(text) * .9)
    cut = text.rfind(b'\n', int(len(text) * .8), latest) + 1 or latest
    while cut < len(text) and text[cut] & 0xC0 == 0x80:         # inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


# ---- sentences ---------------------------------------------------------------------------------------------

def labelled_texts(data, name, form, encoding='utf-8'):
    """The lines in data -> texts, labels. Only ASCII line ends end a line. form: a regular expression, and
    what it means in words. Its groups are a label and a text, or only a text. name: of the file"""
    pattern, words = form
    texts = []
    labels = []
    for number, line in enumerate(data.removeprefix(b'\xef\xbb\xbf').splitlines(), 1):       # without a BOM
        try:
            *label, text = re.fullmatch(pattern, line.decode(encoding)).groups()
        except (AttributeError, UnicodeDecodeError):            # AttributeError: None has no groups
            raise ValueError(f'{name}, line {number}: {line[:30]!r} is not {words}, in {encoding}') from None
        texts.append(text.strip().encode())
        labels.append([int(digits) for digits in label])
    return texts, labels


LINE = r'\s*(\S.*)', 'a sentence'
TABS = r'(\d{1,6})\t\s*(\S.*)', 'a label (number the classes from 0), a tab and a text'
BLANKS = r'(\d{1,6}) \s*(\S.*)', 'a label from 0, a blank and a text'
COLA = r'[^\t]*\t([01])\t[^\t]*\t\s*(\S.*)', 'source, label 0 or 1, mark and text, by tabs'


def every_tenth(side):
    """Split inputs and targets into both sides, in place: lines 10, 20, ... validate."""
    val = [items[9::10] for items in side]
    for items in side:
        del items[9::10]
    return side, val


def lines(path, form=TABS, encoding='utf-8'):
    """Labelled lines: your own, or those of `polarity`. That set has 10,662 sentences of film reviews, 0:
    bad, 1: good (Pang and Lee 2005, arXiv:cs/0506075). They are in lower case, with spaces around
    punctuation, in Windows code page 1252. Every tenth line validates."""
    return every_tenth(labelled_texts(content(path), path, form, encoding))


def trec(*paths):
    """5,452 questions, each asking for one of six kinds of things (Li and Roth 2002). The 500 published test
    questions validate. The files are in Latin-1; code page 1252 extends it."""
    return [labelled_texts(content(path), path, BLANKS, 'cp1252') for path in paths]


def cola(path):
    """8,551 sentences, 1: acceptable English, 0: not (Warstadt et al. 2018, arXiv:1805.12471). Reads the zip,
    or a folder with the files of raw/. 1,043 sentences validate: both dev files, as in GLUE."""
    names = 'in_domain_train.tsv', 'in_domain_dev.tsv', 'out_of_domain_dev.tsv'
    contents = named(path, names, 'raw')
    train, near, far = [labelled_texts(data, name, COLA) for name, data in zip(names, contents)]
    val = [a + b for a, b in zip(near, far)]            # texts, labels
    return train, val


# ---- pairs of sentences ------------------------------------------------------------------------------------

def aligned(path, other):
    """The sentences of a file, and their translations from another file, line by line."""
    sources, _ = labelled_texts(content(path), path, LINE)
    texts, _ = labelled_texts(content(other), other, LINE)
    return matched(sources, path, texts, other)


def parallel(source, target):
    """Your own two files, sources and translations. Every tenth line validates."""
    return every_tenth(aligned(source, target))


def multi30k(*paths):
    """29,000 descriptions of the pictures of Flickr30k, and their translations (Elliott et al. 2016,
    arXiv:1605.00459). Each side has an English file, then a German one. 1,014 pairs validate. The 1,000 of
    test_2016_flickr are the test side."""
    return list(map(aligned, paths[::2], paths[1::2]))


# ---- conversations -----------------------------------------------------------------------------------------

def conversations(path):
    """Conversations of your own, one a line, {"messages": [{"role": "user", "content": "Hi"}, ..]} -> a list
    of lists of messages. Every tenth line validates."""
    expected = '{"messages": [{"role": .., "content": ..}, ..]}'
    found = []
    for number, line in enumerate(content(path).removeprefix(b'\xef\xbb\xbf').splitlines(), 1):
        try:
            messages = json.loads(line)['messages']
            fits = messages and all(type(m['role']) is type(m['content']) is str for m in messages)
        except (ValueError, TypeError, LookupError, RecursionError):
            fits = False
        if not fits:
            raise ValueError(f'{path}, line {number}: {line[:30]!r} is not a conversation, {expected}; to '
                             'read it as plain text, call the file .txt')
        found.append(messages)
    [train], [val] = every_tenth([found])
    return train, val


# ---- pictures ----------------------------------------------------------------------------------------------

def idx(*paths):
    """MNIST, 28 x 28: pictures and labels to train on, then to validate on (the published test side). If only
    the test side is there, its last 3,000 validate."""
    if not os.path.exists(paths[0]):
        paths = paths[2:]
    sides = []
    for images, labels in zip(paths[::2], paths[1::2]):
        x = idx_items(images, [28, 28])
        y = idx_items(labels, [])
        sides.append(matched(x, images, y, labels))
    if len(sides) == 1:
        sides = list(zip(np.split(x, [-3000]), np.split(y, [-3000])))
    return sides


def idx_items(path, shape):
    """The items of an idx file, each of `shape`, as rows. The format: bytes 0, 0, 8 and the number of axes;
    the length of each axis in 4 bytes; the numbers, one byte each (http://yann.lecun.com/exdb/mnist)."""
    data = content(path)
    n = int.from_bytes(data[4:8], 'big')
    size = math.prod(shape)
    header = np.array([0x801 + len(shape), n] + shape, '>u4').tobytes()
    items = data[len(header):]
    if not data.startswith(header) or len(items) != n * size:
        raise ValueError(f'{path}: no idx file of items of {size} bytes, or not a whole one; get it anew')
    return np.frombuffer(items, np.uint8).reshape(n, size)


# ---- files -------------------------------------------------------------------------------------------------

def content(path):
    """The bytes of a file; a .gz is unpacked."""
    if not path.endswith('.gz'):
        return files.read_file(path)
    with of_package(f'{path}: cannot be unpacked'), gzip.open(path) as f:
        return f.read()


def named(path, names, folder=''):
    """The bytes of each of these files: in the folder at path, or of the zip at path, inside `folder` or at
    the top. Nothing is unpacked to disk."""
    if os.path.isdir(path):
        return [content(os.path.join(path, name)) for name in names]
    contents = []
    with of_package(f'{path}: cannot be unpacked'), zipfile.ZipFile(path) as packed:
        for name in names:
            members = [m for m in packed.namelist() if m == name or m.endswith(f'{folder}/{name}')]
            if not members:
                raise ValueError(f'it has no {name}')
            contents.append(packed.read(members[0]))
    return contents


def matched(inputs, path, targets, other):
    """-> inputs, targets: a side made from two files. ValueError unless both are equally long."""
    if len(inputs) != len(targets):
        raise ValueError(f'{path} has {len(inputs):,} rows or lines and {other} {len(targets):,}, expected '
                         'as many: those of one belong to those of the other')
    return inputs, targets
