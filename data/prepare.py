"""Data sets: make data/<name>/{train,val}.bin and meta.json, and load them for every script.

    python data/prepare.py stdlib                        # the default set; takes 1 s, no download
    python data/prepare.py shakespeare                   # 1.1 MB to download
    python data/prepare.py wikitext2 --tokenizer=byte    # also --file=LOCAL_COPY, without a download
    python data/prepare.py notes.txt --tokenizer=char    # any UTF-8 text of your own
    python data/prepare.py novels.txt --tokenizer=bpe:4096      # 4,096 subwords, learned from this text
    python data/prepare.py listops-2048                  # longer rows; of sentences and pairs: cut off later
    python data/prepare.py facts --file=notes.txt        # the text around the facts; default: stdlib
    python data/prepare.py mnist-patch7                  # squares of 7 x 7 pixels
    python data/prepare.py mine.tsv                      # your own lines: a label from 0, a tab, a text
    python data/prepare.py a.en:a.de                     # sentences, and their translations line by line

You need not run these commands first: train.py prepares a missing set itself (`load`). The format:

    {train,val}.bin   flat array of token ids: uint8, uint16 or uint32, no header; some sets have test.bin
    meta.json         name, dtype, vocab_size and tokenizer. Per side (train, val, test): tokens, sha256 of
                      the .bin and, for a text, bytes in UTF-8 (for bits per byte). Tokenizers: byte; gpt2;
                      char and words (separated by spaces) list their tokens in `chars`; bpe:N and json (of a
                      hub model) keep a tokenizer.json in `json`; ids are numbers that stand for no text

A task (data/tasks.py: generated rows, pictures, labelled texts, pairs) also has row and ignore in its meta.
Its file is rows of 2 * row tokens: the inputs, then the targets. target[t] is what to predict after reading
inputs[..t], so nothing is shifted. A target equal to ignore (vocab_size, or classes if these are more) does
not count in the loss. A task may also have

    pad       the padding token, at the end of inputs that are shorter than `row`
    classes   the number of classes of a row; the target at the last real position is 0..classes-1
    source    an encoder reads the first `source` tokens; the others are the decoder's
    patch     p: the tokens are numbers 0..255, and p neighbouring ones are one input, x / 255

Labelled texts are in bytes, or in the tokens of --tokenizer; pad is one more token. If a set has no published
validation side, every tenth line validates. Texts are cut off after 1,024 tokens (trec-64: after 64).

Pairs, for translation, are in bpe:4096, learned from both languages, or in the tokens of --tokenizer. The
first `source` tokens of a row are a sentence. The others are read by the decoder: a pad token to start with,
then the translation. Both parts are filled up with pad, and cut off after 256 tokens (multi30k-64: after 64).
The targets are the tokens of the translation, then one pad that marks the end. Rows keep the order of the
lines.
"""
import argparse
import contextlib
import functools
import glob
import json
import math
import os
import re
import sys
import sysconfig
import zipfile
import zlib

import numpy as np

if not __package__:                                             # run as a script: make `data` importable
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cli import files
from cli.errors import note, script
from cli.flags import from_home
from data import tasks, vocabulary

HERE = os.path.dirname(os.path.abspath(__file__))               # the default folder of the data sets
SIDES = ('train', 'val')                                        # every set has these two; some also have test
# ---- texts: each function returns the training bytes and the validation bytes ------------------------------

def stdlib(_):
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
    [texts], [val] = tasks.every_tenth([texts])
    return b''.join(texts), b''.join(val)


def shakespeare(path):
    """The first 90 % of the characters train, as in nanoGPT. All are ASCII, so characters are bytes."""
    text = files.read_file(path)
    cut = int(len(text) * .9)
    return text[:cut], text[cut:]


def local_text(path):
    """The last 10 % validate. We cut at a line end or, if lines are very long, between two characters."""
    text = files.read_file(path)
    files.as_utf8(text, path)
    latest = int(len(text) * .9)
    cut = text.rfind(b'\n', int(len(text) * .8), latest) + 1 or latest
    while cut < len(text) and text[cut] & 0xC0 == 0x80:         # inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


# ---- the sets ----------------------------------------------------------------------------------------------

HUB = 'https://huggingface.co'                                  # the variable HF_ENDPOINT replaces it
WIKI = {'tokenizer': 'gpt2',
        'make': functools.partial(tasks.named, names=['wiki.train.raw', 'wiki.valid.raw'])}
DATASETS = {    # files: name and sha256, or None if unknown; urls: folders to try, in this order
    'stdlib': {'help': "the .py files of Python's standard library, 12 MB", 'tokenizer': 'byte',
               'make': stdlib},
    'shakespeare': {
        'help': 'tiny shakespeare, 1.1 MB', 'tokenizer': 'char', 'make': shakespeare,
        'files': {'input.txt': '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'},
        'urls': ['https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare']},
    'wikitext2': {
        **WIKI, 'help': 'WikiText-2 raw, 11 MB, CC BY-SA', 'files': {
            'wikitext-2-raw-v1.zip': 'ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11'},
        'urls': ['https://wikitext.smerity.com', f'{HUB}/datasets/ggml-org/ci/resolve/main']},
    'wikitext103': {
        **WIKI, 'help': 'WikiText-103 raw, 540 MB, CC BY-SA', 'files': {
            'wikitext-103-raw-v1.zip': '91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794'},
        'urls': ['https://wikitext.smerity.com',
                 f'{HUB}/datasets/mattdangerw/wikitext-103-raw/resolve/main']},
    **tasks.SETS,
}
OWN = {     # your own files; a folder's name begins with its kind, so kinds never collide
    'text': {'help': 'a text of your own', 'tokenizer': 'byte', 'make': local_text},
    'lines': {**tasks.SENTENCES, 'help': 'labelled lines of your own', 'make': tasks.lines},
    'pairs': {**tasks.PAIRS, 'help': 'translations of your own', 'make': tasks.parallel},
    'joined': {**tasks.SENTENCES, 'help': 'pairs of your own, for a model of texts', 'make': tasks.parallel,
             'answers': 'joined'}}


def find_set(name):
    """The entry of a data set in DATASETS; None if there is no such set. Other row lengths, picture patches
    and files of yours make sets of their own: listops-2048, mnist-patch7, cola:FOLDER."""
    if name in DATASETS:
        return DATASETS[name]
    base, _, path = name.partition(':')
    if os.path.exists(path) and find_set(base):
        return {**find_set(base), 'base': base, 'file': path}
    match = re.fullmatch(r'(.+)-(patch)?([1-9]\d{0,4})', name)
    if not match:
        return None
    base, key, number = match.groups()
    key = key or 'length'
    n = int(number)
    row = DATASETS.get(base, {})
    if key not in row:
        return None
    if key == 'patch' and row['side'] % n:
        raise ValueError(f'{name}: patches of {n} x {n} pixels do not divide pictures of {row["side"]} x '
                         f'{row["side"]}; take a divisor of {row["side"]}')
    return {**row, 'base': base, key: n}                        # base: the set whose folder has the files


def files_of(name):
    """The paths in a name for your own files: one, or two separated by a colon. Paths may have colons."""
    if os.path.exists(name):
        return [name]
    for colon in re.finditer(':', name):
        both = [name[:colon.start()], name[colon.end():]]
        if all(map(os.path.exists, both)):
            return both
    return name.split(':', 1)


def row_of(name, like=None):
    """The entry of a data set in DATASETS or, for your own files, in OWN. like: as for `place`"""
    row = find_set(name)
    if row:
        return row
    kind = 'lines' if name.lower().endswith('.tsv') else 'text'
    if len(files_of(name)) == 2:
        kind = 'pairs'
        if like and 'vocab_size' in like and 'source' not in like:      # a model that knows no pairs
            kind = 'joined'
    return {'own': kind, **OWN[kind]}


# ---- tokenizers --------------------------------------------------------------------------------------------

# ---- files -------------------------------------------------------------------------------------------------

@functools.cache
def kept_in(here, name):
    """The folder of a data set, or of a model from the hub: in data/ (here) or, where that is read-only and
    has no such folder, in the user's cache."""
    folder = os.path.join(here, name)
    if os.path.exists(folder) or os.access(here, os.W_OK) or not os.path.exists(here):
        return folder
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    folder = os.path.join(cache, 'nanofwp', name)
    note(f'{here} is read-only: {folder} is used')
    return folder


def endpoint():
    """The address of the hub, without a final slash."""
    return (os.environ.get('HF_ENDPOINT') or HUB).rstrip('/')


def fetch(name, root=None, file=None):
    """The paths of the files that a set is made from, or a folder in place of an archive. They are --file
    itself, or lie in it, or lie in the set's folder (also if put there by hand); else they are downloaded."""
    row = find_set(name)
    several = len(row['files']) > 1
    if file and os.path.isdir(file):                            # `make` reports missing files
        return [os.path.join(file, base) for base in row['files']] if several else [file]
    folder = place(row.get('base', name), root)
    if file and several:
        raise ValueError(f'--file={file} is no folder; {name} is made from {" and ".join(row["files"])}')
    paths = []
    for base, sha256 in row['files'].items():
        path = file or os.path.join(folder, base)
        links = [f'{site}/{base}'.replace(HUB, endpoint()) for site in row['urls']]
        if not file and not os.path.exists(path):
            files.download(links, path, sha256=sha256)
        files.check_file(path, f'delete or replace {path}, which is not the file of {name}', sha256=sha256)
        paths.append(path)
    return paths


# ---- prepare -----------------------------------------------------------------------------------------------

def place(name, root=None, like=None):
    """The folder of a data set. It depends on the set's name, or on the content of your own files. A path to
    a prepared folder is that folder.

    like: a meta of the tokens and rows wanted, if they are not the set's own. If the usual folder does not
    have these, we take one beside it, whose name also stands for them.
    """
    row = row_of(name, like)
    if 'own' in row and os.path.isdir(name):
        return name
    tokens = like or row
    kind = tokens['tokenizer']
    table = tokens.get('json') or ''.join(tokens.get('chars', []))
    lengths = [str(tokens[key]) for key in ('row', 'source') if key in tokens]      # of a model's rows
    exact = ' '.join([table, *lengths]).strip()
    folder = usual_folder(name, row, kind)
    folder = os.path.join(root, folder) if root else kept_in(HERE, folder)
    says_all = not like or row['tokenizer'] in vocabulary.FIXED            # then the name determines the tokens
    if 'own' in row:
        says_all = not exact
    if says_all:
        return folder
    names = [folder, f'{folder}-{kind.replace(":", "-")}']
    if exact:
        names.append(f'{names[1]}-{files.short_hash(exact.encode())}')
    for candidate in names:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):       # missing or unusable
            meta = json.loads(files.read_file(os.path.join(candidate, 'meta.json')))
            if vocabulary.same_tokens(meta, {**meta, **like}):
                return candidate
    if kind == row['tokenizer'] and not table and not os.path.exists(folder):
        return folder
    return names[-1]


def usual_folder(name, row, tokenizer):
    """The name of a data set's folder, if its tokens are the usual ones. That for your own files depends on
    their content."""
    if 'file' in row:
        paths = sorted(filter(os.path.isfile, glob.glob(f'{row["file"]}/*'))) or [row['file']]
        return f'{row["base"]}-{files.short_hash(b"".join(map(files.read_file, paths)))}'
    if 'own' not in row:
        return name.replace(':', '-')
    paths = files_of(name)
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f'no data set or file {path!r}; choose from {", ".join(DATASETS)}, or give the '
                             'path of a text file, two of parallel lines (a.en:a.de) or a prepared folder')
    stem = os.path.splitext(os.path.basename(paths[0]))[0]
    stem = re.sub('[^A-Za-z0-9_-]+', '_', stem)[:40]
    content = b'\0'.join(files.read_file(path) for path in paths)
    return f'{row["own"]}-{stem}-{files.short_hash(content + tokenizer.encode())}'


def prepare(name, root=None, tokenizer=None, file=None, like=None):
    """Make a data set, even if it exists -> its folder. Either `tokenizer` names the tokens, and the set goes
    to the usual folder, or `like` is a meta that describes them. meta.json is written last: without it, a set
    is unfinished."""
    row = row_of(name, like)
    wish = like or {'tokenizer': tokenizer or row['tokenizer']}
    kind = wish['tokenizer']
    choices = vocabulary.OF_TEXTS
    possible = kind in vocabulary.TOKENIZERS or 'json' in wish or kind in [f'bpe:{n}' for n in vocabulary.LEARNED]
    if row['tokenizer'] in vocabulary.FIXED:
        choices = row['tokenizer']
        possible = kind == choices
    if not possible:
        raise ValueError(f'{name}: its tokens can be {choices}, not {kind}')
    file = file or row.get('file')
    if file and not {'files', 'text'} & set(row):
        raise ValueError(f'--file means nothing for {name}: it is not fetched')
    folder = place(name, root, like if find_set(name) else wish)
    print(f'preparing {folder} ({row["help"]}; tokenizer {kind})', flush=True)
    try:
        meta = {key: wish[key] for key in ('tokenizer', 'vocab_size', 'chars', 'json') if key in wish}
        meta['name'] = os.path.basename(folder)
        paths = files_of(name)
        if 'files' in row:
            paths = fetch(name, root, file)
        if 'text' in row:
            texts = local_text(file) if file else stdlib(None)
            sides = tasks.generate_rows(row, meta, texts)
        elif 'rows' in row:
            sides = tasks.generate_rows(row, meta)
        else:
            sides = row['make'](*paths)
        if 'answers' in row:
            sides = ANSWERS[row['answers']](sides, row['length'], meta, wish)
        if 'answers' in row or row['tokenizer'] in vocabulary.FIXED:
            arrays = tasks.to_rows(sides, row, meta)
        else:
            vocabulary.learn_tokens(sides, meta)
            meta.update({side: {'bytes': len(text)} for side, text in zip(SIDES, sides)})
            arrays = [[vocabulary.tokenize(text, meta)] for text in sides]
        save_set(folder, meta, arrays)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as e:        # disk full; a broken file
        raise ValueError(f'cannot prepare {name}: {e}') from None
    return folder


def labels(sides, most, meta, wish):
    """Texts and their labels -> tokens and labels. They are shuffled, always in the same way, because files
    may be sorted by class. Here and in `pairs` and `joined_pairs`, meta gets the entries about tokens and
    rows."""
    texts, classes = zip(*sides)
    learn_with_pad(texts, meta, wish)
    meta['classes'] = tasks.classes(classes)
    shuffled = []
    tokens, meta['row'] = fitted(texts, meta, most, wish.get('row'), 32)
    for x, y in zip(tokens, classes):
        order = np.random.Generator(np.random.Philox(0)).permutation(len(x))
        shuffled.append(([x[i] for i in order], [y[i] for i in order]))
    return shuffled


def pairs(sides, most, meta, wish):
    """Sentences and their translations -> rows of tokens, targets, as this file's docstring says."""
    sources, texts = zip(*sides)
    learn_with_pad([a + b for a, b in sides], meta, wish)
    given = wish.get('source', 0)
    source_tokens, source = fitted(sources, meta, most, given, 8)
    text_tokens, length = fitted(texts, meta, most, wish.get('row', 0) - given, 8, more=1)
    meta['source'] = source
    meta['row'] = source + length
    pad = np.full(source + 1, meta['pad'])
    rows = []
    for x, y in zip(source_tokens, text_tokens):
        inputs = [np.concatenate([a, pad[len(a):], b]) for a, b in zip(x, y)]
        rows.append((inputs, [np.append(b, pad[0]) for b in y]))
    return rows


def joined_pairs(sides, most, meta, _):
    """Like `pairs`, but for a model that reads both texts as one. A row is a source, a line end, its
    translation (or summary) and a line end. The targets are everything after the first line end. Sources that
    are too long are cut off; translations only where they are longer than half a row."""
    before, _ = vocabulary.ends(meta)
    end = vocabulary.encode('\n', meta)[-1:]
    if not end:
        raise ValueError('the model\'s tokens know no line end to put between a text and its translation; '
                         'take a model of texts, or train one on pairs, without --init or --from')
    meta['pad'] = end[0]
    rows = []
    for sources, texts in sides:
        answers = [vocabulary.continued(text.decode(), end, meta)[:most // 2] for text in texts]
        inputs = []
        for source, text in zip(sources, answers):
            tokens = before + vocabulary.encode(source.decode(), meta)
            inputs.append(tokens[:most - len(text) - 1] + end + text)
        rows.append((inputs, [text + end for text in answers]))
    meta['row'] = row_length([x for x, _ in rows], most, 8)
    return rows


ANSWERS = {'labels': labels, 'pairs': pairs, 'joined': joined_pairs}


def fitted(sides, meta, most, given, step, more=0):
    """UTF-8 texts per side -> a token array per text, and the row length. The row length is `given` if a
    model sets it. Otherwise the longest text fits in, with `more` tokens. Longer texts are cut off, but keep
    the special tokens behind them."""
    from tqdm import tqdm
    before, behind = vocabulary.ends(meta)
    room = (given or most) - more
    by_side = []
    for texts in sides:
        rows = []
        cut = 0
        for number, text in enumerate(tqdm(texts, unit='texts', disable=None), 1):
            text = text.decode()
            tokens = vocabulary.encode(text, meta)
            if not (before or tokens or behind):
                raise ValueError(f'text {number} has no tokens: {text[:30]!r}')
            kept = tokens[:room - len(before) - len(behind)]
            cut += len(kept) < len(tokens)
            rows.append(np.array(before + kept + behind, np.uint32))
        if cut:
            print(f'{cut:,} of {len(texts):,} texts have more than {room} tokens: the rest is cut off')
        by_side.append(rows)
    return by_side, given or row_length(by_side, most, step, more)


def row_length(sides, most, step, more=0):
    """The row length for these lists of tokens, with `more` tokens: a multiple of step, at most `most`."""
    longest = more + max(len(tokens) for side in sides for tokens in side)
    return min(most, step * math.ceil(longest / step))


def learn_with_pad(sides, meta, wish):
    """Like `learn_tokens` for lists of texts; also sets pad: a new token, or the model's."""
    vocabulary.learn_tokens([b'\n'.join(texts) for texts in sides], meta)
    meta['pad'] = wish.get('pad', meta['vocab_size'])
    if meta['pad'] == meta['vocab_size']:
        meta['vocab_size'] += 1
        if 'chars' in meta:
            meta['chars'] = [*meta['chars'], '<pad>']


def save_set(folder, meta, sides):
    """Write the token arrays of each side, and meta with dtype, counts and sha256: all files, or none."""
    dtype = np.min_scalar_type(meta.get('ignore', meta['vocab_size'] - 1))
    meta['dtype'] = dtype.name
    path = os.path.join(folder, 'meta.json')
    with contextlib.ExitStack() as new:
        about = new.enter_context(files.atomic(path))               # entered first, so it is renamed last
        for side, arrays in zip((*SIDES, 'test'), sides):
            data = new.enter_context(files.atomic(os.path.join(folder, side + '.bin')))
            entry = meta.setdefault(side, {})
            entry['sha256'] = files.write_blocks(data, (a.astype(dtype, copy=False).ravel() for a in arrays))
            entry['tokens'] = os.path.getsize(data) // dtype.itemsize
        text = json.dumps(meta, indent=1).encode()
        files.write_blocks(about, [text])
        if os.path.exists(path) and files.read_file(path) != text:    # others may read the same set just now
            os.remove(path)                                     # so nobody combines old and new files


# ---- load --------------------------------------------------------------------------------------------------

def load(name, root=None, tokenizer=None, like=None):
    """-> train, val, meta of a data set. name: a set, a local text file or a prepared folder.

    train and val are read-only memory maps. A missing set is prepared, with `tokenizer` or, if `like` is
    given, in the tokens of that meta (of a model or another set). ValueError if the set is broken or in other
    tokens, or if `tokenizer` contradicts `like`. root: the folder of all sets; None: this file's folder
    """
    if like and tokenizer and like['tokenizer'] != tokenizer:
        raise ValueError(f'--tokenizer={tokenizer}: the tokens are those of the model '
                         f'({vocabulary.describe_tokens(like)}); leave it out')
    if tokenizer:
        like = like or {'tokenizer': tokenizer}
    folder = place(name, root, like)
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if folder == name:
            raise ValueError(f'{path} is missing: {name} is no prepared data set; give a name or a text file')
        prepare(name, root, like=like)
    try:
        meta = json.loads(files.read_file(path))
        train, val = (mapped(folder, meta, side) for side in SIDES)
        if 'test' in meta:
            mapped(folder, meta, 'test')                        # checks that it is not broken, either
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        remedy = 'prepare it anew' if folder == name else f'delete {folder} to have it made anew'
        raise ValueError(f'{path} or its .bin files are broken ({type(e).__name__}: {e}); {remedy}') from None
    if like and not vocabulary.same_tokens(meta, {**meta, **like}):
        remedy = 'make it anew with data/prepare.py, or give the text itself'
        if meta['tokenizer'] in vocabulary.FIXED or like['tokenizer'] in vocabulary.FIXED:
            remedy = 'these cannot be made anew: take other data'
        if 'row' in like and 'row' not in meta:
            remedy = 'this model was trained on rows, so give it labelled lines, or pairs'
        if 'pad' in meta and 'pad' not in like:
            remedy = 'its rows are padded: take an encoder, such as MiniLM, or train a new model on them'
        raise ValueError(f'--data={name}: not in the tokens wanted ({vocabulary.describe_tokens(like)}), but in others '
                         f'({vocabulary.describe_tokens(meta)}); {remedy}')
    if 'json' in meta:
        vocabulary.subwords(meta['json'])                                  # may fail, so before training
    return train, val, meta


def test_side(name, like=None):
    """-> test, meta of a data set with a test side, for the final report. Prepared as in `load`."""
    _, _, meta = load(name, like=like)
    if 'test' not in meta:
        raise ValueError(f'--data={name}: there is no test side, only {" and ".join(SIDES)}; take another '
                         'set, such as multi30k, or report on the validation side')
    return mapped(place(name, None, like), meta, 'test'), meta


def mapped(folder, meta, side):
    """A memory map of the tokens of one side. Checksum and token ranges are verified here."""
    path = os.path.join(folder, side + '.bin')
    dtype = np.dtype(meta['dtype'])
    files.check_file(path, path, meta[side]['tokens'] * dtype.itemsize, meta[side]['sha256'])
    inputs = data = np.memmap(path, dtype, 'r')
    vocab = meta['vocab_size']
    if 'row' in meta:
        inputs, targets = data.reshape(-1, 2, meta['row']).swapaxes(0, 1)
        tasks.check_targets(targets, meta, path)
        counts = (targets != meta['ignore']).sum(1)
        if 'classes' in meta and (counts != 1).any():
            raise ValueError(f'{path}: holds rows with more or fewer targets than one, their class')
    highest = inputs.max()
    if highest >= vocab:
        raise ValueError(f'{path}: holds token {highest}, the vocabulary ends at {vocab - 1}')
    return data


def trained_on(meta):
    """--data of the run that made a model; '' if its file does not say"""
    name = (meta.get('args') or {}).get('data')
    return name if isinstance(name, str) else ''


def for_model(source, meta, name, row):
    """Load data in the tokens of a trained model -> train, val, meta of the data, name. They are for training
    it further or measuring it.

    source: the model's file or name, for messages; meta: its metadata. name: a text, a task or a folder; if
    empty, the model's training data. ValueError if a side of a text has no more than one row of `row` tokens,
    or if the rows of a task are longer than `row`.
    """
    name = name or trained_on(meta)
    if not name:
        raise ValueError(f'{source} does not say what it was trained on: give --data, such as a text file')
    train, val, data = load(name, like=meta['data'])
    if data.get('row', 0) > row:
        raise ValueError(f'--data={name}: its rows have {data["row"]} tokens, more than {row}; give '
                         f'--row={data["row"]} if {source} knows as many, or shorter texts')
    if 'row' not in data and min(len(train), len(val)) <= row + 1:
        raise ValueError(f'--data={name}: too short for rows of {row}; give a longer text, or shorter rows '
                         '(convert.py: --row; bench.py: --row or --lengths)')
    return train, val, data, name


# ---- how a command ends ------------------------------------------------------------------------------------

@script
def main(argv):
    def error(message):                                         # one line, as for every mistake
        raise ValueError(message)

    sets = [f'{name}: {row["help"]} ({row["tokenizer"]})' for name, row in DATASETS.items()]
    parser = argparse.ArgumentParser(description='Make a data set for train.py.', allow_abbrev=False)
    parser.error = error
    about = ('a UTF-8 text file, two files of parallel lines (a.en:a.de), or one of '
             f'{"; ".join(sets)}; listops-2048: in rows of 2,048, mnist-patch7: in patches of 7 x 7')
    parser.add_argument('name', type=from_home, help=about)
    parser.add_argument('--tokenizer', help=vocabulary.OF_TEXTS)
    parser.add_argument('--file', type=from_home, help='use this local copy, no download; several files: their folder')
    args = parser.parse_args(argv)
    if find_set(args.name) or not os.path.isdir(args.name):
        prepare(args.name, None, args.tokenizer, args.file)
    train, val, meta = load(args.name, tokenizer=args.tokenizer)
    unit = 'tokens'
    n = 1
    if 'row' in meta:
        unit = f'rows of {meta["row"]:,} tokens'
        n = 2 * meta['row']
    print(f'{len(train) // n:,} training and {len(val) // n:,} validation {unit}, vocabulary '
          f'{meta["vocab_size"]:,}')


if __name__ == '__main__':
    sys.exit(main())
