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
    python train.py --init=MODEL --data=chats.jsonl      # conversations, see sources.conversations

You need not run these commands first: train.py prepares a missing set itself (`load_set`). The format:

    {train,val}.bin   flat array of token ids: uint8, uint16 or uint32, no header; some sets have test.bin
    meta.json         tokenizer, vocab_size, and the fields of kinds.Data that are not the default, among them
                      per side (train, val, test) tokens, sha256 of the .bin and, of a text, bytes in UTF-8

The file of a set with rows (generated ones, pictures, labelled texts, pairs) has 2 * row tokens for each: the
inputs, then the targets. target[t] is what to predict after reading inputs[..t], so nothing is shifted. A
target equal to ignore (vocab_size, or classes if these are more) does not count in the loss.

Labelled texts are in bytes, or in the tokens of --tokenizer; pad is one more token. If a set has no published
validation side, every tenth line validates. Texts, and conversations, are cut off after 1,024 tokens or what
a model takes (trec-64: after 64).

Pairs, for translation, are in bpe:4096, learned from both languages, or in the tokens of --tokenizer. The
first `source` tokens of a row are a sentence. The others are read by the decoder: a pad token to start with,
then the translation. Both parts are filled up with pad, and cut off after 256 tokens (multi30k-64: after 64).
The targets are the tokens of the translation, then one pad that marks the end. Rows keep the order of the
lines.
"""
import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass

import numpy as np

if not __package__:                                             # run as a script: make `data` importable
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import files
from common.errors import of_package, script
from common.flags import flag, parse, refuse
from data import vocabulary
from data.kinds import Data
from data.sets import DATASETS, entry_of, files_of, find_set
from data.ways import WAYS

FOLDER = os.path.dirname(os.path.abspath(__file__))               # the default folder of the data sets
SIDES = ('train', 'val')                                        # every set has these two; some also have test


# ---- where a set lies, and what it is made from ------------------------------------------------------------

def fetch(name, entry, root=None, file=None):
    """The paths of the files that a set is made from, or a folder in place of an archive. They are --file
    itself, or lie in it, or lie in the set's folder (also if put there by hand); else they are downloaded."""
    if file and os.path.isdir(file):                            # `make` reports missing files
        if len(entry.files) > 1:
            return [os.path.join(file, base) for base in entry.files]
        return [file]
    folder = place(entry.base or name, root)
    paths = []
    for base, sha256 in entry.files.items():
        path = file or os.path.join(folder, base)
        links = [f'{site}/{base}' for site in entry.urls]
        if not file and not os.path.exists(path):
            files.download(links, path, sha256=sha256)
        files.check_file(path, f'{path} is not the file of {name}', sha256)
        paths.append(path)
    return paths


def place(name, root=None, like=None):
    """The folder of a data set. It depends on the set's name, or on the content of your own files. A path to
    a prepared folder is that folder.

    like: the tokens and rows wanted, a Data, if they are not the set's own. If the usual folder does not have
    these, we take one beside it, whose name also stands for them.
    """
    entry = entry_of(name, like)
    if entry.own and os.path.isdir(name):
        return name
    wish = like or Data(entry.tokenizer)
    usual = os.path.join(root or FOLDER, usual_folder(name, entry, wish.tokenizer))
    table = wish.json or ''.join(wish.chars)
    most = entry.length if wish.most else 0
    lengths = [str(n) for n in (wish.row, wish.source, most) if n]      # of a model's rows
    marks = ['marks'] * wish.marks                              # its special tokens are read as such
    frames = [f'{wish.template} {wish.special} {wish.ends} {wish.files}'] * (entry.own == 'chats')
    exact = ' '.join([table, *lengths, *marks, *frames]).strip()
    if entry.own and not exact:                                 # then its name stands for the tokenizer, too
        return usual
    if not entry.own and (like is None or entry.tokenizer in vocabulary.FIXED):
        return usual
    beside = f'{usual}-{wish.tokenizer.replace(":", "-")}'
    folders = [usual, beside]
    if exact:
        folders.append(f'{beside}-{files.short_hash(exact.encode())}')
    for folder in folders:
        if holds(folder, like):
            return folder
    if wish.tokenizer == entry.tokenizer and not table and not os.path.exists(usual):
        return usual
    return folders[-1]


def described(folder):
    """What the meta.json of a prepared folder says. An error if it is missing or broken."""
    return Data(**json.loads(files.read_file(os.path.join(folder, 'meta.json'))))


def holds(folder, like):
    """Whether a set with the tokens and rows of `like` is prepared in a folder."""
    try:
        return described(folder).has_tokens_of(like)
    except (OSError, ValueError, TypeError):
        return False


def usual_folder(name, entry, tokenizer):
    """The name of a data set's folder, if its tokens are the usual ones. That for your own files depends on
    their content."""
    if not entry.own:
        return name.replace(':', '-')
    paths = files_of(name)
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f'no data set or file {path!r}; choose from {", ".join(DATASETS)}, or give the '
                             'path of a text file, two of parallel lines (a.en:a.de) or a prepared folder')
    stem = os.path.splitext(os.path.basename(paths[0]))[0]
    stem = re.sub('[^A-Za-z0-9_-]+', '_', stem)[:40]
    content = b'\0'.join(files.read_file(path) for path in paths)
    return f'{entry.own}-{stem}-{files.short_hash(content + tokenizer.encode())}'


# ---- prepare -----------------------------------------------------------------------------------------------

def prepare(name, root=None, tokenizer=None, file=None, like=None):
    """Make a data set, even if it exists -> its folder. Either `tokenizer` names the tokens, and the set goes
    to the usual folder, or `like` describes them, a Data. meta.json is written last: without it, a set is
    unfinished; an older one does not fit the sha256 of new files."""
    entry = entry_of(name, like)
    wish = like or Data(tokenizer or entry.tokenizer)
    refuse(cannot_be_in(wish, entry, name))
    if file and not entry.files and entry.way != 'facts':
        raise ValueError(f'--file means nothing for {name}: it is not fetched')
    folder = place(name, root, wish if entry.own else like)
    print(f'preparing {folder} ({entry.help}; tokenizer {wish.tokenizer})', flush=True)
    meta = Data(wish.tokenizer, wish.vocab_size, os.path.basename(folder), wish.chars, wish.json, wish.marks)
    try:
        paths = []
        if file:
            paths = [file]
        if entry.files:
            paths = fetch(name, entry, root, file)
        elif entry.own:
            paths = files_of(name)
        save_set(folder, meta, WAYS[entry.way](entry, paths, meta, wish))
    except (OSError, ValueError) as e:                          # also a full disk
        raise ValueError(f'cannot prepare {name}: {e}') from None
    return folder


def cannot_be_in(wish, entry, name):
    """For `refuse`: a tokenizer that there is not, or not for this set."""
    kind = wish.tokenizer
    yield entry.own == 'chats' and not wish.template, (
        f'{name}: conversations are written in a model\'s chat template; give the model, one that has such a '
        'template: --init=FOLDER (convert.py: --from)')
    if entry.tokenizer in vocabulary.FIXED:
        yield kind != entry.tokenizer, f'{name}: its tokens can be {entry.tokenizer}, not {kind}'
    else:
        size = re.fullmatch(r'bpe:(\d+)', kind)
        learned = size and int(size[1]) in vocabulary.LEARNED
        yield not (wish.json or kind in vocabulary.TOKENIZERS or learned), (
            f'{name}: its tokens can be {vocabulary.OF_TEXTS}, not {kind}')


def save_set(folder, meta, sides):
    """Write the token arrays of each side, and meta with dtype, counts and sha256: after an error the
    old files stay."""
    dtype = np.min_scalar_type(meta.ignore if meta.row else meta.vocab_size - 1)
    meta.dtype = dtype.name
    with contextlib.ExitStack() as new:
        path = os.path.join(folder, 'meta.json')
        about = new.enter_context(files.atomic(path))           # entered first, so it is renamed last
        for side, arrays in zip((*SIDES, 'test'), sides):
            data = new.enter_context(files.atomic(os.path.join(folder, side + '.bin')))
            digest = files.write_blocks(data, (a.astype(dtype, copy=False).ravel() for a in arrays))
            counts = {'sha256': digest, 'tokens': os.path.getsize(data) // dtype.itemsize}
            setattr(meta, side, {**(getattr(meta, side) or {}), **counts})
        files.write_blocks(about, [json.dumps(meta.as_dict(), indent=1).encode()])


# ---- load --------------------------------------------------------------------------------------------------

def load_set(name, root=None, tokenizer=None, like=None):
    """-> train, val, Data of a set. name: a set, a local text file or a prepared folder.

    train and val are read-only memory maps. A missing set is prepared, with `tokenizer` or, if `like` is
    given, in the tokens of that Data (of a model or another set). ValueError if the set is broken or in other
    tokens, or if `tokenizer` contradicts `like`. root: the folder of all sets; None: data/
    """
    if like and tokenizer and like.tokenizer != tokenizer:
        raise ValueError(f'--tokenizer={tokenizer}: the tokens are those of the model ({like.summary()}); '
                         'leave it out')
    if tokenizer:
        like = like or Data(tokenizer)
    folder = place(name, root, like)
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        prepare(name, root, like=like)
    try:
        meta = described(folder)
        train, val = (mapped(folder, meta, side) for side in SIDES)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f'{path} or its .bin files are broken ({type(e).__name__}: {e}); prepare it anew, '
                         'or delete the folder to have it made anew') from None
    if like and not meta.has_tokens_of(like):
        raise ValueError(f'--data={name}: not in the tokens wanted ({like.summary()}), but in others '
                         f'({meta.summary()}); give the text itself, or a set that can be made in these')
    if meta.json:
        with of_package(f'{path}: no tokens'):
            vocabulary.subwords(meta.json)
    if like:
        meta.bos = like.bos
    if meta.json:
        for side in train, val:
            if meta.row:                                        # inputs alone, without padding
                side = side.reshape(-1, 2, meta.row)[:, 0]
                side = side[side != meta.pad]
            vocabulary.tell_lost(side, meta, f'--data={name}: ')
    return train, val, meta


def test_side(name, like=None):
    """-> test, Data of a set with a test side, for the final report. Prepared as in `load_set`."""
    _, _, meta = load_set(name, like=like)
    if meta.test is None:
        raise ValueError(f'--data={name}: there is no test side, only {" and ".join(SIDES)}; take another '
                         'set, such as multi30k, or report on the validation side')
    return mapped(place(name, None, like), meta, 'test'), meta


def mapped(folder, meta, side):
    """A memory map of the tokens of one side, whose checksum is verified here."""
    path = os.path.join(folder, side + '.bin')
    files.check_file(path, path, getattr(meta, side)['sha256'])
    return np.memmap(path, meta.dtype, 'r')


def trained_on(meta, source):
    """--data of the run that made a model, by the meta of its file. ValueError, with the source (its file or
    name), if that does not say"""
    name = (meta.get('args') or {}).get('data')
    if not (name and isinstance(name, str)):
        raise ValueError(f'{source} does not say what it was trained on: give --data, such as a text file')
    return name


def for_model(source, meta, name, row):
    """Load data in the tokens of a trained model -> train, val, Data, name. They are for training it further
    or measuring it.

    source: the model's file or name, for messages; meta: its metadata. name: a text, a task or a folder; if
    empty, the model's training data. ValueError if a side of a text has no more than one row of `row` tokens,
    or if the rows of a task are longer than `row`.
    """
    name = name or trained_on(meta, source)
    train, val, data = load_set(name, like=meta['data'])
    if data.row > row:
        raise ValueError(f'--data={name}: its rows have {data.row} tokens, more than {row}; give '
                         f'--row={data.row} if {source} knows as many, or shorter texts')
    if data.kind == 'text' and min(len(train), len(val)) <= row + 1:
        raise ValueError(f'--data={name}: too short for rows of {row}; give a longer text, or shorter rows '
                         '(convert.py: --row; bench.py: --row or --lengths)')
    return train, val, data, name


# ---- the command -------------------------------------------------------------------------------------------

@dataclass
class Args:
    tokenizer: str = flag('', vocabulary.OF_TEXTS)
    file: str = flag('', 'use this local copy, no download; several files: their folder', path=True)


@script
def main(argv):
    name = argv[0] if argv and not argv[0].startswith('-') else ''
    sets = '\n'.join(f'    {name:12} {entry.help} ({entry.tokenizer})' for name, entry in DATASETS.items())
    what, commands, rest = (__doc__ or '\n\n\n\n').split('\n\n', 2)
    doc = f'{what}\n\n{commands}\nSets, and their tokens:\n{sets}\n\n{rest}'
    [given] = parse(argv[1:] if name else argv, doc, Args, first='tokenizer file')
    args = Args(**given)
    if find_set(name) or not os.path.isdir(name):
        prepare(name, None, args.tokenizer, args.file)
    train, val, meta = load_set(name, tokenizer=args.tokenizer)
    unit = 'tokens'
    if meta.row:
        unit = f'rows of {meta.row:,} tokens'
    print(f'{len(train) // meta.step:,} training and {len(val) // meta.step:,} validation {unit}, vocabulary '
          f'{meta.vocab_size:,}')


if __name__ == '__main__':
    sys.exit(main())
