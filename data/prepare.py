"""All data sets: makes data/<name>/{train,val}.bin and meta.json, and reads them back for every script.

    python data/prepare.py stdlib                        # the default set, 1 s, nothing to download
    python data/prepare.py shakespeare                   # 1.1 MB to download
    python data/prepare.py wikitext2 --tokenizer=byte    # also --url=MIRROR and --file=LOCAL_COPY
    python data/prepare.py notes.txt --tokenizer=char    # any UTF-8 text of your own
    python data/prepare.py novels.txt --tokenizer=bpe:4096      # 4,096 subwords, learned from it
    python data/prepare.py listops --length=2048         # longer rows: train.py --data=listops-2048
    python data/prepare.py facts --file=notes.txt        # the text around the facts; else that of stdlib
    python data/prepare.py mnist --patch=7               # squares of 7 x 7 pixels: --data=mnist-patch7
    python data/prepare.py mine.tsv                      # lines of your own: a label from 0, a tab, a text
    python data/prepare.py a.en:a.de                     # sentences, and line by line their translations

train.py needs none of these: `load(name)` prepares what is not there yet. The format:

    {train,val}.bin   flat array of token ids, uint8, uint16 or uint32, no header; of some sets test.bin, too
    meta.json         name, dtype, vocab_size, tokenizer: byte, char (table: chars), gpt2, bpe:N or json (of a
                      model of the hub), both with the text of a tokenizer.json: json, words (between blanks;
                      table: chars), or ids (numbers that stand for no text here); of train, val (and
                      test): tokens, sha256 of the .bin, and, of a text, bytes in UTF-8 (for bits per byte)

A task (data/tasks.py: generated, pictures, labelled texts, pairs) has row and ignore in its meta, too: the
file is rows of 2 * row tokens, the inputs, then the targets. target[t] is what to predict after reading
inputs[..t], so nothing is shifted; a target equal to ignore (= vocab_size) does not count in the loss. A task
may also have

    pad       the token of steps that are not there: rows that are shorter than `row` end in it
    classes   how many classes a row can be of; the target at its last real place is one of them, 0..classes-1
    source    how many tokens, from the first, an encoder reads; the others are the decoder's
    patch     p: the tokens are numbers 0..255, and p of them side by side are one input, x / 255

Labelled texts are bytes, or by --tokenizer what texts can be, and pad is one token more. Where nobody
published what to validate on, it is every tenth line. A text longer than 1,024 tokens (or --length) is cut
off there.

Pairs, for translation, are in bpe:4096, learned from both languages, or by --tokenizer. The first `source`
tokens of a row are a sentence; the others are what a decoder reads: pad, as nothing is said yet, then the
translation. Both parts are filled up with pad, and cut off behind 256 tokens (or --length). The targets are
the tokens of the translation, then pad once: the end. Row i is line i.
"""
import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import sysconfig
import threading
import time

import numpy as np

if not __package__:                                             # python data/prepare.py: find data/ itself
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from data import tasks

HERE = os.path.dirname(os.path.abspath(__file__))               # where sets lie, unless told otherwise
SIDES = ('train', 'val')                                        # every set has them; some have test, too
FIXED = ('ids', 'words')                                        # of sets that can be in no other
TOKENIZERS = ('byte', 'char', 'gpt2')                           # and bpe:N, for these N:
LEARNED = range(257, 65537)                                     # 256 bytes, and what is learned
LONG_WORD = r'(\S{1000})'                                       # is split there: its pairs would take hours
OF_TEXTS = f'{", ".join(TOKENIZERS)} or bpe:N, N from {LEARNED[0]} to {LEARNED[-1]:,}'


# ---- texts: each returns the bytes to train on and the bytes to validate on --------------------------------

def stdlib(_):
    """The .py files of the Python that runs this. A fixed rule decides the bytes, so that figures can be
    compared: regular *.py files outside the folders in `skip`; relative paths with "/", sorted by code point;
    number i is for validation if i % 10 == 9; raw bytes, joined without a separator."""
    root = sysconfig.get_paths()['stdlib']
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    paths = []
    for folder, dirs, names in os.walk(root):                   # does not follow links to folders
        dirs[:] = set(dirs) - skip                              # in place: os.walk goes on with these
        for path in [os.path.join(folder, n) for n in names if n.endswith('.py')]:
            if os.path.isfile(path) and not os.path.islink(path):
                paths.append(os.path.relpath(path, root).replace(os.sep, '/'))
    texts = [read(os.path.join(root, p)) for p in sorted(paths)]
    (texts, _), (val, _) = tasks.every_tenth(texts, [])
    return b''.join(texts), b''.join(val)


def shakespeare(path):
    """The first 90 % of the characters are for training, as in nanoGPT (all ASCII: characters are bytes)."""
    text = read(path)
    cut = int(len(text) * .9)
    return text[:cut], text[cut:]


def local_text(path):
    """The last 10 % are for validation, cut at a line end or, if lines are very long, between two
    characters."""
    text = read(path)
    text.decode()                                               # refuses what is not UTF-8
    latest = int(len(text) * .9)
    cut = text.rfind(b'\n', int(len(text) * .8), latest) + 1 or latest
    while cut < len(text) and text[cut] & 0xC0 == 0x80:         # inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


def wikitext(path):
    """From the zip as published, or a folder with wiki.train.raw and wiki.valid.raw."""
    return list(tasks.named(path, 'wiki.train.raw', 'wiki.valid.raw').values())


# ---- the sets ----------------------------------------------------------------------------------------------

HUB = 'https://huggingface.co'                                  # the environment's HF_ENDPOINT replaces it
WIKI = {'tokenizer': 'gpt2', 'make': wikitext}
DATASETS = {    # files: name and sha256, or None where not known; urls: folders that have them, in turn
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
FLAGS = {
    '--tokenizer': OF_TEXTS,
    '--length': 'tokens of a row, or of a part of a pair, at most: another set, as listops-2048',
    '--patch': 'side of the squares of a picture: another set, as mnist-patch7',
    '--url': 'fetch from this mirror; of several files: the folder',
    '--file': 'a local copy of what would be fetched; of several files: the folder'}
OWN = {     # files of your own; how names of folders begin, so that no two kinds share one
    'text': {'help': 'a text of your own', 'tokenizer': 'byte', 'make': local_text},
    'lines': {**tasks.SENTENCES, 'help': 'labelled lines of your own', 'make': tasks.lines},
    'pairs': {**tasks.PAIRS, 'help': 'translations of your own', 'make': tasks.parallel},
    'told': {**tasks.SENTENCES, 'help': 'pairs of your own, for a model of texts', 'make': tasks.parallel,
             'answers': 'told'}}


def find(name):
    """The entry of a data set by its name, or None. Rows of another length, and pictures in patches, are data
    sets of their own: listops-2048, mnist-patch7."""
    if name in DATASETS:
        return DATASETS[name]
    said = re.fullmatch(r'(.+)-(patch)?([1-9]\d{0,4})', name)
    if not said:
        return None
    base, key, number = said.groups()
    key = key or 'length'
    n = int(number)
    row = DATASETS.get(base, {})
    if key not in row:
        return None
    if key == 'patch' and row['side'] % n:
        raise ValueError(f'{name}: patches of {n} x {n} pixels do not divide pictures of {row["side"]} x '
                         f'{row["side"]}; take a divisor of {row["side"]}')
    return {'base': base, **row, key: n}                        # base: where its files lie


def having(key):
    """Names of the data sets whose entries have this key, for messages."""
    return ', '.join(name for name, row in DATASETS.items() if key in row)


def files_of(name):
    """The paths of your own files in a name: one, or two with a colon between them."""
    return [name] if os.path.exists(name) else name.split(':', 1)


def row_of(name, like=None):
    """The entry of a data set by its name, or the one for your own files. like: as for `place`"""
    kind = 'lines' if name.endswith('.tsv') else 'text'
    if len(files_of(name)) == 2:
        kind = 'pairs'
        if like and 'vocab_size' in like and 'source' not in like:      # a model that knows no pairs
            kind = 'told'
    row = find(name)
    if name.startswith('group:') and not row:
        raise ValueError(f'{name}: no such group; there are {", ".join(tasks.GROUPS)}, and with rows of '
                         'another length group:S3-256')
    return row or {'own': kind, **OWN[kind]}


# ---- tokenizers --------------------------------------------------------------------------------------------

def gpt2():
    """GPT-2's tokenizer. ValueError if it is not cached and cannot be downloaded (1.5 MB, once)."""
    try:
        import tiktoken
        return watched(functools.partial(tiktoken.get_encoding, 'gpt2'), patience=50)
    except (ImportError, OSError, ValueError) as e:
        raise ValueError(f"cannot get GPT-2's tokenizer ({type(e).__name__}: {str(e)[:60]}...); set "
                         'TIKTOKEN_CACHE_DIR to a folder where tiktoken cached it before, or take another '
                         'tokenizer') from None


def package(remedy=''):
    """The package `tokenizers`, which only subwords need. ValueError if it is not installed."""
    try:
        import tokenizers
        return tokenizers
    except ImportError:
        raise ValueError('these tokens need a package that is not here: pip install tokenizers'
                         f'{remedy}') from None


@contextlib.contextmanager
def of_package(what):
    """Turn what the package raises into a ValueError that begins with `what`: a plain Exception, or a panic,
    which is not an Exception and writes lines of its own to standard error, past Python."""
    kept = os.dup(2)
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:      # noqa: BLE001  it raises nothing narrower
        raise ValueError(f'{what} ({e})') from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def growth(step):
    """How many times as long a text may become in a step of a tokenizer.json that rewrites it, including the
    steps inside that step."""
    if not isinstance(step, dict):
        return 1
    times = {'ByteLevel': 2}.get(step.get('type'), 1)
    for text in step.get('content', ''), 'x' + step.get('prepend', ''):
        times *= max(1, len(text))
    for part in itertools.chain(*(step.get(name) or [] for name in ('normalizers', 'decoders'))):
        times *= growth(part)
    return times


@functools.lru_cache(4)
def subwords(text):
    """The tokenizer that the text of a tokenizer.json describes. ValueError if it describes none, or one that
    makes a text much longer."""
    from_str = package().Tokenizer.from_str
    with of_package('no description of a tokenizer'):
        frame = json.loads(text)
        found = from_str(text)
        times = max(growth(frame.get(name)) for name in ('normalizer', 'decoder'))
    if times > 1000:
        raise ValueError(f'this tokenizer makes a text up to {times:,} times as long, expected at most 1,000')
    found.encode_special_tokens = True                          # "<s>" in a text is three characters
    found.no_truncation()
    found.no_padding()
    return found


def learn(data, size):
    """The text of a tokenizer.json: bytes and splits as in GPT-2, and `size` tokens (fewer if nothing repeats
    any more) learned from UTF-8 data by byte pair encoding (Sennrich 2016, arXiv:1508.07909)."""
    tokenizers = package('; --tokenizer=byte does without it')
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = found.pre_tokenizer.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    parts = (part for text in pieces(data) for part in re.split(LONG_WORD, text))
    found.train_from_iterator(parts, trainer)
    return found.to_str()


def units(meta):
    """What each token id of a char, words or ids tokenizer looks like as text."""
    kind = meta.get('tokenizer')
    if kind in ('char', 'words'):
        return meta['chars']
    if kind == 'ids':
        return [str(i) for i in range(meta['vocab_size'])]
    raise ValueError(f'unknown tokenizer {kind!r}, not {OF_TEXTS}, or ids')


def encode(text, meta):
    """Token ids of a text, by the meta of a data set or of a checkpoint. For ids, a text is numbers between
    blanks; for words, it is anything else between them."""
    kind = meta.get('tokenizer')
    if kind == 'byte':
        return list(text.encode('utf-8', 'surrogateescape'))    # stray bytes of a terminal stay as they are
    if kind == 'gpt2':
        return gpt2().encode_ordinary(text)
    if 'json' in meta:
        text = text.encode('utf-8', 'replace').decode()         # here stray bytes are question marks
        with of_package('its tokenizer cannot read this text'):
            ids = subwords(meta['json']).encode(text, add_special_tokens=False).ids
        if max(ids, default=0) >= meta['vocab_size']:
            raise ValueError(f'its tokenizer makes token {max(ids)} of this text, beyond the vocabulary')
        return ids
    ids = {unit: i for i, unit in enumerate(units(meta))}
    if kind in FIXED:
        text = text.split()
    unknown = sorted(set(text) - set(ids))
    if unknown:
        words = ' or '.join(repr(u[:20]) for u in unknown[:10])
        raise ValueError(f'there is no token for {words}{remedy(meta)}')
    return [ids[unit] for unit in text]


def remedy(meta):
    """What a message says if tokens stand for no text, because a model's tokenizer was missing."""
    if 'missing' in meta:
        return f'; {meta["missing"]} is missing: put it there, and texts can be read'
    return ''


def ends(meta):
    """The tokens that tokenizer.json puts before and after a text: [BOS] and [], [CLS] and [SEP]."""
    if 'json' not in meta:
        return [], []
    with of_package('its tokenizer cannot read a letter'):
        found = subwords(meta['json']).encode('a')
    before = found.special_tokens_mask.index(0)
    behind = found.special_tokens_mask[::-1].index(0)
    return found.ids[:before], found.ids[len(found.ids) - behind:]


def whole_text(text, meta, most=None):
    """Token ids of a text for a model that classifies it, from its first token to its last. If there are more
    than `most` tokens, the text is cut off, but not the tokens that stand after it."""
    before, behind = ends(meta)
    tokens = encode(text, meta)
    if most is not None:
        tokens = tokens[:most - len(before) - len(behind)]
    return before + tokens + behind


def begun(tokens, meta):
    """The tokens of a prompt, as a text begins: after BOS, if tokenizer.json puts it there. If there are none
    at all: a line end, or token 0 if the data set has none."""
    tokens = ends(meta)[0] + tokens
    if tokens:
        return tokens
    try:
        return encode('\n', meta)[:1] or [0]
    except ValueError:
        return [0]


def source_rows(texts, meta):
    """The rows of tokens that an encoder of sources reads: a list of N str -> (N, longest), padded.
    ValueError for a text that is empty, or has more than meta['source'] tokens."""
    most = meta['source']
    rows = []
    for number, text in enumerate(texts, 1):
        text = text.strip()
        tokens = whole_text(text, meta)
        if not text or len(tokens) > most:
            raise ValueError(f'text {number} has {len(tokens)} tokens, expected 1 to {most}: {text[:30]!r}; '
                             'leave it out, or cut it into sentences')
        rows.append(tokens)
    longest = max(map(len, rows))
    return np.array([row + [meta['pad']] * (longest - len(row)) for row in rows])


def decode(tokens, meta):
    """The text of token ids, without padding. Bytes that are not UTF-8 become replacement characters."""
    tokens = [int(t) for t in tokens if t != meta.get('pad')]
    wrong = [t for t in tokens if t not in range(meta['vocab_size'])]
    if wrong:
        raise ValueError(f'token {wrong[0]} is outside the vocabulary of {meta["vocab_size"]}')
    kind = meta.get('tokenizer')
    if kind == 'byte':
        return bytes(tokens).decode('utf-8', 'replace')
    if kind == 'gpt2':
        return gpt2().decode(tokens)
    if 'json' in meta:
        with of_package('its tokenizer cannot write these tokens'):
            return subwords(meta['json']).decode(tokens, skip_special_tokens=False)
    table = units(meta)
    words = [table[t] for t in tokens]
    return (' ' if kind in FIXED else '').join(words)


# A blank between two letters, both ASCII or both of two bytes, as in Greek and Cyrillic. Tokenizers split in
# front of it, whatever stands around; of line ends and punctuation some make one token.
BETWEEN = re.compile(rb'(?<=[A-Za-z]) (?=[A-Za-z])|(?<=[\xc3-\xdf].) (?=[\xc3-\xdf])', re.S)
PHRASE = re.compile('[A-Za-z][ \u0120\u2581]')                  # in a token: it goes on behind such a blank


def pieces(data, size=1 << 20):
    """UTF-8 data as strings of about a megabyte, so that memory stays bounded, cut at BETWEEN."""
    start = 0
    while start < len(data):
        cut = BETWEEN.search(data, start + size)
        end = cut.start() if cut else len(data)
        yield data[start:end].decode()
        start = end


def tokenize(data, meta, size=1 << 20):
    """Arrays of token ids that together are the tokens of data. Some tokenizers put a blank in front of what
    they read, so a piece is read after the letter before it."""
    if meta['tokenizer'] == 'byte':                             # as it is: the stdlib need not be UTF-8
        yield np.frombuffer(data, np.uint8)
        return
    from tqdm import tqdm
    if 'json' in meta and any(map(PHRASE.search, subwords(meta['json']).get_vocab())):
        size = len(data)                                        # there is no place to cut at
    letter = ''
    # disable=None: a bar on a terminal only
    for text in tqdm(pieces(data, size), total=len(data) // size + 1, unit='MB', disable=None):
        before = encode(letter, meta)
        tokens = encode(letter + text, meta)
        if tokens[:len(before)] != before:
            raise ValueError(f'this tokenizer reads {letter!r} in another way before {text[:20]!r}')
        yield np.array(tokens[len(before):])
        letter = text[-1]


# ---- files -------------------------------------------------------------------------------------------------

def read(path):
    """The bytes of a file."""
    with tasks.readable(path), open(path, 'rb') as f:
        return f.read()


def refuse_irregular(path):
    """ValueError if a file would replace a pipe, a device or a folder."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f'{path}: no regular file, so it is not replaced; give another name')


@contextlib.contextmanager
def whole(path):
    """`with whole(path) as temp:` write a file named temp, and it becomes path in one step. Whoever reads
    path meanwhile, or after a crash at any moment, finds the old file or the new one. A failure leaves the
    old file and nothing else. What was written is on the disk before it is renamed."""
    refuse_irregular(path)
    temp = f'{path}.{os.getpid()}.part'
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        yield temp
        with open(temp, 'rb+') as f:
            os.fsync(f.fileno())
        os.replace(temp, path)
    finally:
        if os.path.exists(temp):
            os.remove(temp)


def put(path, blocks):
    """Write blocks of bytes to a file -> their sha256."""
    digest = hashlib.sha256()
    with open(path, 'wb') as f:
        for block in blocks:
            f.write(block)
            digest.update(block)
    return digest.hexdigest()


def write(path, blocks):
    """The same: the whole file under that name, or nothing."""
    with whole(path) as temp:
        put(temp, blocks)


def write_json(path, found):
    """The same for what JSON can say."""
    write(path, [json.dumps(found, indent=1).encode()])


def flaw(path, size=None, sha256=None):
    """What is wrong with a downloaded file, in words, or None. A size or sha256 of None is not known."""
    found = os.path.getsize(path)
    if size and found != size:
        return f'{found:,} bytes, not {size:,}'
    if sha256:
        digest = hashlib.sha256(np.memmap(path, mode='r')).hexdigest()      # of a map: files are gigabytes
        if digest != sha256:
            return f'sha256 is {digest}, not {sha256}'


STALL = 20      # seconds without a block of BLOCK bytes after which nothing more is waited for
BLOCK = 1 << 14


def watched(work, path='', patience=None):
    """Call work() in a thread -> what it returns. requests.Timeout if it runs for so many seconds while the
    file at path does not grow: for a socket, a server that sends one byte now and then is alive. The thread
    is then abandoned."""
    import requests
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as e:      # noqa: BLE001  which is raised where it is waited for
            future.set_exception(e)
    threading.Thread(target=run, daemon=True).start()
    patience = patience or STALL
    grown = 0
    while not future.done():
        before = grown
        concurrent.futures.wait([future], patience)
        grown = os.path.getsize(path) if os.path.exists(path) else 0
        if grown == before and not future.done():
            raise requests.Timeout(f'nothing came, or little, in {patience} s')
    return future.result()


def download(links, path, size=None, sha256=None, headers=None, look=None):
    """Fetch path from the first of the links that has what is wanted. It arrives whole, or ValueError: if no
    link has it, if it has another size or sha256, or if look(file, link) refuses it. A broken connection is
    tried again, three times; a server that stops sending is not. requests honours HTTPS_PROXY."""
    import requests
    problems = []
    for link in links:
        for attempt in range(4):
            time.sleep(attempt / 2)
            try:
                with whole(path) as temp:
                    watched(functools.partial(receive, link, temp, headers), temp)
                    wrong = flaw(temp, size, sha256)
                    if wrong:
                        raise ValueError(f'{link}: {wrong}')
                    if look:
                        look(temp, link)
                return
            except requests.RequestException as e:
                problem = f'{link}: {type(e).__name__}: {str(e)[:100]}'
                if isinstance(e, requests.Timeout):
                    break
            except ValueError as e:
                problem = str(e)
                break
        problems.append(problem)
    raise ValueError(f'{"; ".join(problems)}; try again, or put the file at {path} by hand (its sha256: '
                     f'{sha256 or "not known"})')


def receive(url, path, headers):
    """Write what comes from url to a file. requests.RequestException if fewer bytes come than announced."""
    import requests
    from tqdm import tqdm
    headers = {**(headers or {}), 'Accept-Encoding': 'identity'}        # compressed, sizes are of other bytes
    with requests.get(url, headers=headers, stream=True, timeout=(10, 30)) as reply, open(path, 'wb') as f:
        reply.raise_for_status()
        total = int(reply.headers.get('Content-Length', 0))
        with tqdm(total=total, unit='B', unit_scale=True, disable=None) as bar:
            for block in reply.iter_content(BLOCK):
                bar.update(f.write(block))


def endpoint():
    """The address of the hub, without a slash at its end."""
    return (os.environ.get('HF_ENDPOINT') or HUB).rstrip('/')


def fetch(name, root=None, url=None, file=None):
    """The paths of the files that a data set is made from, or of a folder instead of an archive. They are
    --file, or in it, or in the data set's folder (also if someone put them there by hand), or they are
    downloaded."""
    row = find(name)
    several = len(row['files']) > 1
    if file and os.path.isdir(file):                            # whoever reads it sees what it lacks
        return [os.path.join(file, base) for base in row['files']] if several else [file]
    folder = place(row.get('base', name), root)
    if file and several:
        raise ValueError(f'--file={file} is no folder; {name} is made from {" and ".join(row["files"])}')
    paths = []
    for base, sha256 in row['files'].items():
        path = file or os.path.join(folder, base)
        links = [f'{site}/{base}'.replace(HUB, endpoint()) for site in row['urls']]
        if url:
            links = [f'{url}/{base}' if several else url]
        if not file and not os.path.exists(path):
            download(links, path, sha256=sha256)
        wrong = flaw(path, sha256=sha256)
        if wrong:
            raise ValueError(f'{path} is not the file of {name}: {wrong}; delete it, or replace it')
        paths.append(path)
    return paths


# ---- prepare -----------------------------------------------------------------------------------------------

def place(name, root=None, like=None):
    """The folder of a data set: by its name, by the content of a text file, or a prepared folder as it is.

    like: what is known of the tokens that are wanted, if they are not the data set's own. The usual folder is
    taken only if it is in these tokens already; otherwise one beside it, named after the tokens as well."""
    row = row_of(name, like)
    tokens = like or row
    kind = tokens['tokenizer']
    table = tokens.get('json') or ''.join(tokens.get('chars', []))
    says_all = not like or row['tokenizer'] in FIXED            # the name does
    folder = name.replace(':', '-')
    if 'own' in row:
        if os.path.isdir(name):
            return name
        folder = own_folder(name, row['own'], kind)
        says_all = not table
    folder = os.path.join(root or HERE, folder)
    if says_all:
        return folder
    names = [folder, f'{folder}-{kind.replace(":", "-")}']
    if table:
        names.append(f'{names[1]}-{short_hash(table.encode())}')
    for found in names:
        with contextlib.suppress(ValueError, AttributeError, TypeError):        # not there, or of no use
            meta = json.loads(read(os.path.join(found, 'meta.json')))
            if same_tokens(meta, {**meta, **like}):
                return found
    if kind == row['tokenizer'] and not table and not os.path.exists(folder):
        return folder
    return names[-1]


def own_folder(name, begin, tokenizer):
    """The name of the folder for your own files, by their content."""
    paths = files_of(name)
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f'no data set or file {path!r}; choose from {", ".join(DATASETS)}, or give the '
                             'path of a text file, two of parallel lines (a.en:a.de) or a prepared folder')
    stem = os.path.splitext(os.path.basename(paths[0]))[0]
    stem = re.sub('[^A-Za-z0-9_-]+', '_', stem)[:40]
    content = b'\0'.join(read(path) for path in paths)
    return f'{begin}-{stem}-{short_hash(content + tokenizer.encode())}'


def short_hash(data):
    """Eight hexadecimal digits that depend on all the bytes: enough to name a folder."""
    return hashlib.sha256(data).hexdigest()[:8]


def prepare(name, root=None, tokenizer=None, url=None, file=None, like=None):
    """Prepare a data set anew; returns its folder. tokenizer says which tokens, in the usual folder; or like,
    what is known of them. meta.json is written last: as long as it is missing, the folder is unfinished."""
    row = row_of(name, like)
    wish = like or {'tokenizer': tokenizer or row['tokenizer']}
    kind = wish['tokenizer']
    choices = OF_TEXTS
    learns = re.fullmatch(r'bpe:\d{3,5}', kind) and int(kind[4:]) in LEARNED
    possible = kind in TOKENIZERS or 'json' in wish or learns
    if row['tokenizer'] in FIXED:
        choices = row['tokenizer']
        possible = kind == choices
    if not possible:
        raise ValueError(f'{name} is not in the tokens wanted, {kind}: it can be in {choices} (ids are '
                         f'numbers of which no text is known here){remedy(wish)}')
    if (url and 'files' not in row) or (file and not {'files', 'text'} & set(row)):
        raise ValueError(f'--url and --file mean nothing for {name}: it is not fetched')
    folder = place(name, root, wish)
    if find(name) and not like:
        folder = place(name, root)
    print(f'preparing {folder} ({row["help"]}; tokenizer {kind})', flush=True)
    try:
        meta = {key: wish[key] for key in ('tokenizer', 'vocab_size', 'chars', 'json') if key in wish}
        meta['name'] = os.path.basename(folder)
        paths = files_of(name)
        if 'files' in row:
            paths = fetch(name, root, url, file)
        if 'text' in row:
            texts = local_text(file) if file else stdlib(None)
            sides = tasks.generate(row, meta, texts)
        elif 'rows' in row:
            sides = tasks.generate(row, meta)
        else:
            sides = row['make'](*paths)
        if 'answers' in row:
            sides = ANSWERS[row['answers']](sides, row['length'], meta, wish)
        if 'answers' in row or row['tokenizer'] in FIXED:
            arrays = tasks.packed(sides, row, meta)
        else:
            learn_tokens(sides, meta)
            meta.update({side: {'bytes': len(text)} for side, text in zip(SIDES, sides)})
            arrays = [tokenize(text, meta) for text in sides]
        save(folder, meta, arrays)
    except (OSError, ValueError) as e:                          # OSError: not allowed, disk full
        raise ValueError(f'cannot prepare {name}: {e}') from None
    return folder


def labels(sides, most, meta, wish):
    """Texts and their labels -> the same in tokens, in an order that is random but always the same, because
    files have one class after the other. meta gets everything there is to say about tokens and rows, here and
    below."""
    texts, classes = zip(*sides)
    learn_with_pad(texts, meta, wish)
    meta['classes'] = tasks.classes(classes)
    found = []
    tokens, meta['row'] = fitted(texts, meta, most, wish.get('row'), 32)
    for x, y in zip(tokens, classes):
        order = np.random.Generator(np.random.Philox(0)).permutation(len(x))
        found.append(([x[i] for i in order], [y[i] for i in order]))
    return found


def pairs(sides, most, meta, wish):
    """Sentences and their translations -> the same in tokens. A row is a padded source, then pad, since
    nothing is said yet, and the translation. Behind that, pad is the last target."""
    sources, texts = zip(*sides)
    learn_with_pad([a + b for a, b in sides], meta, wish)
    given = wish.get('source', 0)
    read, source = fitted(sources, meta, most, given, 8)
    said, length = fitted(texts, meta, most, wish.get('row', 0) - given, 8, before=1)
    meta['source'] = source
    meta['row'] = source + length
    pad = np.full(source + 1, meta['pad'])
    found = []
    for x, y in zip(read, said):
        inputs = [np.concatenate([a, pad[len(a):], b]) for a, b in zip(x, y)]
        found.append((inputs, [np.append(b, pad[0]) for b in y]))
    return found


def told(sides, most, meta, _):
    """The same for a model of texts, which reads one after the other. A row is a source, a line end, the
    translation (or summary) and a line end. Its targets are what comes after the first line end. What is too
    long for a row is cut off; of a translation, only what is longer than half of the row."""
    before, _ = ends(meta)
    end = encode('\n', meta)[-1:]
    if not end:
        raise ValueError('the model\'s tokens know no line end, behind which a translation could stand; take '
                         'a model of texts, or without --init and --from one of pairs')
    meta['pad'] = end[0]
    found = []
    for sources, texts in sides:
        said = [encode(text.decode(), meta)[:most // 2] for text in texts]
        inputs = []
        for source, text in zip(sources, said):
            tokens = before + encode(source.decode(), meta)
            inputs.append(tokens[:most - len(text) - 1] + end + text)
        found.append((inputs, [text + end for text in said]))
    meta['row'] = length_of([x for x, _ in found], most, 8)
    return found


ANSWERS = {'labels': labels, 'pairs': pairs, 'told': told}


def fitted(sides, meta, most, given, step, before=0):
    """UTF-8 texts of each side -> an array of tokens for each text, and the length of rows that hold them and
    `before` more tokens: that of a model's rows, `given`, if there is one. Anything longer is cut off."""
    from tqdm import tqdm
    room = (given or most) - before
    found = []
    for texts in sides:
        tokens = []
        cut = 0
        for number, text in enumerate(tqdm(texts, unit='texts', disable=None), 1):
            text = text.decode()
            row = whole_text(text, meta)
            if not row:
                raise ValueError(f'text {number} has no tokens: {text[:30]!r}')
            if len(row) > room:
                row = whole_text(text, meta, room)
                cut += 1
            tokens.append(np.array(row, np.uint32))
        if cut:
            print(f'{cut:,} of {len(texts):,} texts have more than {room} tokens: the rest is cut off')
        found.append(tokens)
    return found, given or length_of(found, most, step, before)


def length_of(sides, most, step, before=0):
    """How many tokens the longest of some lists needs, with `before` more, in multiples of step; at most
    `most`."""
    longest = before + max(len(tokens) for side in sides for tokens in side)
    return min(most, step * math.ceil(longest / step))


def learn_tokens(sides, meta):
    """Put into meta the number of tokens and the table of characters, or the subwords, unless it has them.
    They come from the text of each side."""
    if not all(sides):
        raise ValueError('too short to be split into training and validation')
    kind = meta['tokenizer']
    if kind == 'byte':
        meta['vocab_size'] = 256
    if kind == 'gpt2':
        meta['vocab_size'] = gpt2().n_vocab                     # fails, if it must, before files are replaced
    if kind == 'char':
        if 'chars' not in meta:
            meta['chars'] = sorted({c for text in sides for piece in pieces(text) for c in piece})
        meta['vocab_size'] = len(meta['chars'])
    if kind.startswith('bpe:') and 'json' not in meta:          # a model may have room for more tokens
        meta['json'] = learn(sides[0], int(kind.removeprefix('bpe:')))
        meta['vocab_size'] = subwords(meta['json']).get_vocab_size()


def learn_with_pad(sides, meta, wish):
    """The same from the texts of each side, and pad: one token more than there are, or a model's."""
    learn_tokens([b'\n'.join(texts) for texts in sides], meta)
    meta['pad'] = wish.get('pad', meta['vocab_size'])
    if meta['pad'] == meta['vocab_size']:
        meta['vocab_size'] += 1
        if 'chars' in meta:
            meta['chars'] = [*meta['chars'], '<pad>']


def save(folder, meta, sides):
    """Write the arrays of tokens of each side, and meta with their type, number and sha256: all or
    nothing."""
    dtype = np.min_scalar_type(meta.get('ignore', meta['vocab_size'] - 1))
    meta['dtype'] = dtype.name
    path = os.path.join(folder, 'meta.json')
    with contextlib.ExitStack() as files:
        about = files.enter_context(whole(path))                # the first in is the last out
        for side, arrays in zip((*SIDES, 'test'), sides):
            data = files.enter_context(whole(os.path.join(folder, side + '.bin')))
            said = meta.setdefault(side, {})
            said['sha256'] = put(data, (a.astype(dtype, copy=False).tobytes() for a in arrays))
            said['tokens'] = os.path.getsize(data) // dtype.itemsize
        put(about, [json.dumps(meta, indent=1).encode()])
        if os.path.exists(path):
            os.remove(path)                                     # nobody reads the new beside the old


# ---- load --------------------------------------------------------------------------------------------------

def load(name, root=None, tokenizer=None, like=None):
    """(train, val, meta) of a data set by name, of a local text file, or of a prepared folder by its path.

    train and val are read-only memory maps. What is missing is prepared, with `tokenizer` or, if `like` is
    given, in the tokens of that meta (a model's, or another data set's). ValueError for what is broken or in
    other tokens, and if tokenizer and like contradict each other. root: the folder that has a folder for each
    data set; None: the folder of this file"""
    if like and tokenizer and like['tokenizer'] != tokenizer:
        raise ValueError(f'--tokenizer={tokenizer}: the tokens are those of the model ({described(like)}); '
                         'leave it out')
    if tokenizer:
        like = like or {'tokenizer': tokenizer}
    folder = place(name, root, like)
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if folder == name:
            raise ValueError(f'{path} is missing: {name} is no prepared data set; give a name or a text file')
        prepare(name, root, like=like)
    try:
        meta = json.loads(read(path))
        check(meta)
        train, val = (mapped(folder, meta, side) for side in SIDES)
        if 'test' in meta:
            mapped(folder, meta, 'test')                        # nothing in the folder is broken
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        remedy = 'prepare it anew' if folder == name else f'delete {folder} to have it made anew'
        raise ValueError(f'{path} or its .bin files are broken ({type(e).__name__}: {e}); {remedy}') from None
    if like and not same_tokens(meta, {**meta, **like}):
        raise ValueError(f'--data={name}: not in the tokens wanted ({described(like)}), but in others '
                         f'({described(meta)}); make it anew with data/prepare.py, or give the text itself')
    if 'json' in meta:
        subwords(meta['json'])                                  # fails, if it must, before a model is trained
    return train, val, meta


def test_side(name, root=None, like=None):
    """(test, meta) of a data set with a third side, like load(): the rows to report on at the end."""
    _, _, meta = load(name, root, like=like)
    if 'test' not in meta:
        raise ValueError(f'--data={name}: there is no test side, only {" and ".join(SIDES)}; take another '
                         'set, such as multi30k, or what load() has')
    return mapped(place(name, root, like), meta, 'test'), meta


LIMITS = {      # whole numbers: the least they can be, which entry they are below, and by how much at least
    'vocab_size': (1, None, 0), 'row': (1, None, 0), 'ignore': (0, None, 0), 'pad': (0, 'vocab_size', 1),
    'classes': (2, 'vocab_size', 0), 'source': (1, 'row', 1), 'patch': (1, 'row', 0)}


def check_tokens(meta):
    """ValueError if what meta.json, or the header of a checkpoint, says about tokens is incomplete or
    contradicts itself."""
    for key, (low, other, below) in LIMITS.items():
        high = meta.get(other, 2 ** 32) - below
        found = meta.get(key)
        wrong = type(found) is not int or not low <= found <= high              # isinstance would take True
        if wrong and (key in meta or key == 'vocab_size'):
            raise ValueError(f'{key} is {found!r:.60}, expected a whole number from {low} to {high}')
    kind = meta.get('tokenizer')
    vocab = meta['vocab_size']
    described = isinstance(kind, str) and isinstance(meta.get('json'), str)
    if kind not in TOKENIZERS + FIXED and not described:
        raise ValueError(f'tokenizer {kind!r:.60} is not known')
    if vocab < {'byte': 256, 'gpt2': 50257}.get(kind, 1):
        raise ValueError(f'vocab_size is {vocab}, too few for the tokenizer {kind}')
    chars = meta.get('chars')
    are_texts = isinstance(chars, list) and all(isinstance(text, str) for text in chars)
    if kind in ('char', 'words') and not (are_texts and len(chars) == vocab):
        raise ValueError(f'vocab_size {vocab} is not the number of chars, or these are no texts')


def check(meta):
    """ValueError, KeyError or TypeError if a meta.json is incomplete or contradicts itself."""
    check_tokens(meta)
    vocab = meta['vocab_size']
    if meta['dtype'] not in ('uint8', 'uint16', 'uint32'):
        raise ValueError(f'dtype {meta["dtype"]!r:.60} is not known')
    sides = [meta[side] for side in SIDES]
    if 'test' in meta:
        sides.append(meta['test'])
    for side in sides:
        counts = {'tokens': side['tokens']}
        if 'row' not in meta:
            counts['bytes'] = side['bytes']
        for key, found in counts.items():
            if type(found) is not int or found < 1:
                raise ValueError(f'{key} of a side is {found!r}, expected a whole number from 1')
    of_rows = {'ignore', 'pad', 'classes', 'source', 'patch'} & meta.keys()
    if of_rows and 'row' not in meta:
        raise ValueError(f'{min(of_rows)} is there, but no row, of which it says something')
    beside = [key in meta for key in ('row', 'pad', 'classes', 'patch')]
    if 'source' in meta and beside != [True, True, False, False]:
        raise ValueError('source is there: expected row and pad, too, and neither classes nor patch')
    if 'patch' in meta and (vocab != 256 or meta['row'] % meta['patch']):
        raise ValueError(f'patch does not divide row, or vocab_size is {vocab}, not 256')


def mapped(folder, meta, side):
    """A memory map of one side's tokens, each of which has been checked once."""
    path = os.path.join(folder, side + '.bin')
    dtype = np.dtype(meta['dtype'])
    wrong = flaw(path, meta[side]['tokens'] * dtype.itemsize, meta[side]['sha256'])
    if wrong:
        raise ValueError(f'{path}: {wrong}')
    inputs = data = np.memmap(path, dtype, 'r')
    vocab = meta['vocab_size']
    if 'row' in meta:
        inputs, targets = data.reshape(-1, 2, meta['row']).swapaxes(0, 1)
        highest = targets[targets != meta['ignore']].max(initial=0)
        if highest >= meta.get('classes', vocab):
            raise ValueError(f'{path}: holds target {highest}, beyond the vocabulary or the classes')
        counts = (targets != meta['ignore']).sum(1)
        for i in np.flatnonzero(counts != 1)[:1]:
            if 'classes' in meta:
                raise ValueError(f'{path}: row {i} has {counts[i]} targets, but a row is of one class')
    highest = inputs.max()
    if highest >= vocab:
        raise ValueError(f'{path}: holds token {highest}, the vocabulary ends at {vocab - 1}')
    return data


TABLES = 'chars', 'json'
TOKEN_KEYS = 'tokenizer', 'vocab_size', *TABLES, 'row', 'source', 'patch'


def same_tokens(a, b):
    """Whether two meta.json describe the same tokens and, for tasks, rows of the same length."""
    return all(a.get(key) == b.get(key) for key in TOKEN_KEYS)


def described(meta):
    """How a message describes the tokens of a meta."""
    return ', '.join(f'{key} {meta[key]}' for key in TOKEN_KEYS if key in meta and key not in TABLES)


def for_model(source, meta, name, row, root=None):
    """The data to recover or measure a trained model with, in its own tokens -> train, val, data meta, name.

    source: the model's file or name, for messages   meta: its metadata   name: a text, a task or a folder; if
    empty, what the model was trained on. A text has more than one row of `row` tokens on either side; rows of
    a task (meta has row) are not longer."""
    name = name or (meta.get('args') or {}).get('data')
    if not name or not isinstance(name, str):
        raise ValueError(f'{source} does not say what it was trained on: give --data')
    train, val, data = load(name, root, like=meta['data'])
    if data.get('row', 0) > row:
        raise ValueError(f'--data={name}: its rows have {data["row"]} tokens, more than {row}, which is what '
                         f'{source} or --row allows')
    if 'row' not in data and min(len(train), len(val)) <= row + 1:
        raise ValueError(f'--data={name}: too short for rows of {row} (convert.py: see --row)')
    return train, val, data, name


# ---- how a command ends ------------------------------------------------------------------------------------

def keep_memory():
    """Tell glibc to keep freed memory (up to 32 MB per piece). Otherwise it returns megabytes to the system
    and takes them again, with a page fault every 4 KB: half the time of a layer at T = 4,096."""
    with contextlib.suppress(OSError, AttributeError, TypeError):       # no glibc, no need
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)                   # M_MMAP_THRESHOLD


def script(main):
    """Run a script's main(argv). -> exit code: 0; or, for what a user can cause, 2 and one line on stderr"""
    def run(argv=None):
        keep_memory()
        for name in 'stdout', 'stderr':
            if getattr(sys, name) is None:                      # closed: its number is another file's next
                setattr(sys, name, open(os.devnull, 'w'))       # noqa: SIM115
            if isinstance(getattr(sys, name), io.TextIOWrapper):
                getattr(sys, name).reconfigure(errors='replace')        # of an output that knows but ASCII
        try:
            try:
                main(sys.argv[1:] if argv is None else argv)
            finally:
                print(end='', flush=True)                       # now, where a closed pipe can be told
            return 0
        except KeyboardInterrupt:
            print('\nstopped', file=sys.stderr)
            return 130
        except BrokenPipeError:                                 # who read what is printed has gone: | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except ModuleNotFoundError as e:
            said = f'{e}: pip install -r requirements.txt brings it'
        except (MemoryError, RuntimeError) as e:
            said = f'this takes more memory than there is: {str(e) or "MemoryError"}'
            if isinstance(e, RuntimeError) and not re.search('out of memory|allocate memory', said):
                raise
        except FileExistsError as e:
            said = f'{e.filename}: {e.strerror}, where a folder is to be made; give another name'
        except (ValueError, OSError) as e:
            said = str(e)
            if getattr(e, 'filename', None):
                said = f'{e.filename}: {e.strerror}'
        print('error:', *said.split(), file=sys.stderr)
        return 2
    return run


@script
def main(argv):
    def error(message):                                         # one line, as for every other mistake
        raise ValueError(message)

    sets = [f'{name}: {row["help"]} ({row["tokenizer"]})' for name, row in DATASETS.items()]
    parser = argparse.ArgumentParser(description='Make a data set for train.py.', allow_abbrev=False)
    parser.error = error
    parser.add_argument('name', help='the path of a UTF-8 text file, those of two of parallel lines, '
                        f'a.en:a.de, or one of {"; ".join(sets)}')
    for flag, about in FLAGS.items():
        parser.add_argument(flag, help=about)
    parser.add_argument('--unpacked', type=int, default=tasks.UNPACKED, help='bytes that an archive unpacks '
                        f'to at most, if not {tasks.UNPACKED:,}')
    args = parser.parse_args(argv)
    tasks.UNPACKED = max(1, args.unpacked)
    name = args.name
    if args.length:
        name += f'-{args.length}'
    if args.patch:
        name += f'-patch{args.patch}'
    if name != args.name and not find(name):
        raise ValueError(f'there is no set {name}; --length is for {having("length")}, --patch for '
                         f'{having("patch")}; both are whole numbers from 1')
    if find(name) or not os.path.isdir(name):
        prepare(name, None, args.tokenizer, args.url, args.file)
    train, val, meta = load(name, tokenizer=args.tokenizer)
    unit = 'tokens'
    n = 1
    if 'row' in meta:
        unit = f'rows of {meta["row"]:,} tokens'
        n = 2 * meta['row']
    if 'test' in meta:
        unit += f' ({meta["test"]["tokens"] // n:,} more to test)'
    print(f'{len(train) // n:,} training and {len(val) // n:,} validation {unit}, vocabulary '
          f'{meta["vocab_size"]:,}')


if __name__ == '__main__':
    sys.exit(main())
