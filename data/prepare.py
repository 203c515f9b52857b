"""All data sets: makes data/<name>/{train,val}.bin and meta.json, and reads them back for every script.

    python data/prepare.py stdlib                        # the default set, 1 s, nothing to download
    python data/prepare.py shakespeare                   # 1.1 MB to download
    python data/prepare.py wikitext2 --tokenizer=byte    # also --url=MIRROR and --file=LOCAL_COPY
    python data/prepare.py notes.txt --tokenizer=char    # any UTF-8 text of your own

train.py needs none of these: `load(name)` prepares what is not there yet. The format:

    {train,val}.bin   flat array of token ids, uint8, uint16 or uint32, no header
    meta.json         name, dtype, vocab_size, tokenizer: byte, char (table: chars), gpt2 or ids (a task);
                      of train and val: tokens, sha256 of the .bin, bytes of UTF-8 text (for bits per byte)

A generated task has row and ignore in its meta, too: the file is rows of 2 * row tokens, the inputs, then the
targets. target[t] is what to predict after reading inputs[..t], so nothing is shifted; a target equal to
ignore (= vocab_size) does not count in the loss.
"""
import argparse, functools, hashlib, json, os, re, sys, sysconfig, time
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
SIDES = ('train', 'val')
TOKENIZERS = ('byte', 'char', 'gpt2')


# ---- texts: each returns the bytes to train on and the bytes to validate on --------------------------------

def stdlib(_):
    """The .py files of the Python that runs this. The bytes are fixed by rule, so figures can be compared:
    regular *.py files outside the folders in `skip`; relative paths with "/", sorted by code point; number i
    is for validation when i % 10 == 9; raw bytes, joined without a separator."""
    root = sysconfig.get_paths()['stdlib']
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    paths = []
    for folder, dirs, names in os.walk(root):                   # does not follow links to folders
        dirs[:] = [d for d in dirs if d not in skip]
        full = [os.path.join(folder, n) for n in names if n.endswith('.py')]
        paths += [os.path.relpath(p, root).replace(os.sep, '/') for p in full
                  if os.path.isfile(p) and not os.path.islink(p)]
    if not paths:
        raise ValueError(f'no .py files below {root} (a zipped Python?); use --data=path/to/file.txt')
    texts = [read(os.path.join(root, p)) for p in sorted(paths)]
    return b''.join(t for i, t in enumerate(texts) if i % 10 != 9), b''.join(texts[9::10])


def shakespeare(path):
    """The first 90 % of the characters train, as in nanoGPT (all ASCII: characters are bytes)."""
    text = read(path)
    return text[:int(len(text) * .9)], text[int(len(text) * .9):]


def local_text(path):
    """The last 10 % validate, cut at a line end (where lines are very long, between two characters)."""
    text = read(path)
    for _ in pieces(text):                                      # refuses what is not UTF-8
        pass
    cut = text.rfind(b'\n', int(len(text) * .8), int(len(text) * .9)) + 1 or int(len(text) * .9)
    while cut < len(text) and text[cut] & 0xC0 == 0x80:         # inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


def wikitext(path):
    """From the zip as published, or a folder with wiki.train and wiki.valid, both .raw or both .tokens."""
    if os.path.isdir(path):
        for kind in ('raw', 'tokens'):                          # never one of each: only .tokens has <unk>
            pair = [os.path.join(path, f'wiki.{side}.{kind}') for side in ('train', 'valid')]
            if all(map(os.path.isfile, pair)):
                return read(pair[0]), read(pair[1])
        raise ValueError(f'{path}: holds neither wiki.train.raw and wiki.valid.raw nor the two as .tokens')
    import zipfile
    try:
        with zipfile.ZipFile(path) as z:
            member = {os.path.basename(n): n for n in z.namelist()}
            return z.read(member['wiki.train.raw']), z.read(member['wiki.valid.raw'])
    except (zipfile.BadZipFile, KeyError) as e:
        raise ValueError(f'{path}: not the zip with wiki.train.raw and wiki.valid.raw ({e})') from None


# ---- tasks: each returns inputs and targets, both (rows, length); targets are `vocab` where nothing counts -

def recall(rows, rng, vocab, training, length=128, keep=False):
    """Associative recall (Zhang et al. 2024, arXiv:2402.04347, Sec. 3.2): key value ... key -> value.

    A row is a window of such a stream: value, (key, value) x 63, key. The last key was seen before, and the
    value it had last is what validation counts; in training that of every key seen before counts: the same
    task, learned from 44 targets a row instead of one. Keys are the lower half of the vocabulary, values the
    upper. `recall`: a value is drawn anew each time, so memory must be overwritten, as in Schlag et al. 2021,
    Sec. 6.1.2; `recall-kept`: a row draws one map from keys to values and keeps to it. The text at hand says
    neither which nor the sizes: vocabulary 40 and length 128 are from memory; 10,000 and 2,000 rows are the
    paper's.
    """
    half, n, i = vocab // 2, length // 2, np.arange(rows)[:, None]
    keys, values = rng.integers(0, half, (rows, n)), rng.integers(half, vocab, (rows, n))
    keys[:, -1:] = keys[i, rng.integers(0, n - 1, (rows, 1))]           # the query: key of an earlier pair
    if keep:
        values = values[i, keys]
    same = (keys[:, :, None] == keys[:, None, :]) & np.tri(n, k=-1, dtype=bool)
    last = np.where(same, np.arange(n), -1).max(-1)                     # where each key was seen last, or -1
    x, y = np.empty((rows, length), int), np.full((rows, length), vocab)
    x[:, 0] = rng.integers(half, vocab, rows)                           # its key lies before the window
    x[:, 1::2], x[:, 2::2] = keys, values[:, :-1]
    y[:, 1::2] = np.where(last < 0, vocab, values[i, last])
    y[:, :-1] = y[:, :-1] if training else vocab
    return x, y


def mqar(rows, rng, vocab, training, length=128, pairs=8, a=0.01):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): pairs, then their keys asked for.

    Keys from 1..V/2-1, values from V/2..V-1, none twice within a row. Each key comes again once, 2i tokens
    after the pairs' end, the i = 0, 1, ... drawn without replacement with p(i) ~ a (i+1)^(a-1); the target
    there is its value. All other inputs are 0, as in the settings of the paper's figure 2 (the default of its
    code: random tokens). The paper trains on 100,000 rows, here are 20,000; it, too, tests on 3,000.
    """
    def distinct(low, high):                                    # draws rows again until none has a repeat
        draw = rng.integers(low, high, (rows, pairs))
        while (again := (np.diff(np.sort(draw, 1), axis=1) == 0).any(1)).any():
            draw[again] = rng.integers(low, high, (again.sum(), pairs))
        return draw

    keys, values = distinct(1, vocab // 2), distinct(vocab // 2, vocab)
    x, y = np.zeros((rows, length), int), np.full((rows, length), vocab)
    x[:, 0:2 * pairs:2], x[:, 1:2 * pairs:2] = keys, values
    p = a * np.arange(1, length // 2 - pairs + 1) ** (a - 1)
    # Exponential(1) / p in ascending order is a draw from p without replacement, for all rows at once
    at = 2 * pairs + 2 * np.argsort(rng.exponential(size=(rows, len(p))) / p, axis=1)[:, :pairs]
    np.put_along_axis(x, at, keys, 1)
    np.put_along_axis(y, at, values, 1)
    return x, y


HUB = 'https://huggingface.co'                                  # the environment's HF_ENDPOINT replaces it
DATASETS = {
    'stdlib': dict(help="the .py files of Python's standard library, 12 MB", tokenizer='byte', make=stdlib),
    'shakespeare': dict(
        help='tiny shakespeare, 1.1 MB', tokenizer='char', make=shakespeare, size=1_115_394,
        sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
        urls=['https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt']),
    'wikitext2': dict(
        help='WikiText-2 raw, 11 MB, CC BY-SA', tokenizer='gpt2', make=wikitext, size=4_721_645,
        sha256='ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11',
        urls=['https://wikitext.smerity.com/wikitext-2-raw-v1.zip',
              f'{HUB}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip']),
    'wikitext103': dict(
        help='WikiText-103 raw, 540 MB, CC BY-SA', tokenizer='gpt2', make=wikitext, size=191_984_949,
        sha256='91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794',
        urls=['https://wikitext.smerity.com/wikitext-103-raw-v1.zip',
              f'{HUB}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip']),
    'recall': dict(help='generated: recall the last value of a key', tokenizer='ids', vocab=40,
                   make=recall, rows=(10_000, 2_000)),
    'recall-kept': dict(help='generated: keys keep their value', tokenizer='ids', vocab=40,
                        make=functools.partial(recall, keep=True), rows=(10_000, 2_000)),
    'mqar': dict(help='generated: multi-query recall', tokenizer='ids', make=mqar, vocab=8192,
                 rows=(20_000, 3_000)),
}


# ---- tokenizers --------------------------------------------------------------------------------------------

def gpt2():
    try:
        import tiktoken
        return tiktoken.get_encoding('gpt2')                    # fetches 1.5 MB once, into its cache
    except (ImportError, OSError, ValueError) as e:
        raise ValueError(f"cannot get GPT-2's tokenizer ({type(e).__name__}: {str(e)[:60]}...); set "
                         'TIKTOKEN_CACHE_DIR to a folder where tiktoken cached it before, or take another '
                         'tokenizer') from None


def units(meta):
    """What each token id of a char or ids tokenizer is written as."""
    if meta.get('tokenizer') not in ('char', 'ids'):
        raise ValueError(f'unknown tokenizer {meta.get("tokenizer")!r}, not {", ".join(TOKENIZERS)} or ids')
    return meta['chars'] if meta['tokenizer'] == 'char' else [str(i) for i in range(meta['vocab_size'])]


def encode(text, meta):
    """Token ids of a text, by the meta of a data set or of a checkpoint."""
    if meta.get('tokenizer') == 'byte':
        return list(text.encode('utf-8', 'surrogateescape'))    # stray bytes of a terminal stay as they are
    if meta.get('tokenizer') == 'gpt2':
        return gpt2().encode_ordinary(text)
    ids = {unit: i for i, unit in enumerate(units(meta))}
    text = text if meta['tokenizer'] == 'char' else text.split()
    if unknown := sorted(set(text) - set(ids)):
        raise ValueError(f'no token of this data set is {" or ".join(repr(u[:20]) for u in unknown[:10])}')
    return [ids[unit] for unit in text]


def first(meta):
    """The tokens an empty prompt stands for: a line end, where the set has one, else token 0."""
    try:
        return encode('\n', meta)[:1] or [0]
    except ValueError:
        return [0]


def decode(tokens, meta):
    """The text of token ids; where bytes are not UTF-8 it has replacement characters."""
    tokens = [int(t) for t in tokens]
    if bad := [t for t in tokens if not 0 <= t < meta['vocab_size']]:
        raise ValueError(f'token {bad[0]} is outside the vocabulary of {meta["vocab_size"]}')
    if meta.get('tokenizer') == 'byte':
        return bytes(tokens).decode('utf-8', 'replace')
    if meta.get('tokenizer') == 'gpt2':
        return gpt2().decode(tokens)
    table = units(meta)
    return ('' if meta['tokenizer'] == 'char' else ' ').join(table[t] for t in tokens)


def pieces(data, size=1 << 20):
    """UTF-8 data as strings of about a megabyte, so that memory stays bounded. Each cut is before a blank
    and after a printed character: GPT-2 splits there anyway, so the pieces have the tokens of the whole."""
    blank, start = re.compile(rb'(?<=[!-~])[ \n]'), 0
    while start < len(data):
        cut = blank.search(data, start + size)
        end = cut.start() if cut else len(data)
        try:
            yield data[start:end].decode('utf-8')
        except UnicodeDecodeError as e:
            raise ValueError(f'not a UTF-8 text: byte {start + e.start:,} is wrong') from None
        start = end


def tokenize(data, meta):
    """Arrays of token ids which together are the tokens of data."""
    if meta['tokenizer'] == 'byte':                             # as it is: the stdlib need not be UTF-8
        yield np.frombuffer(data, np.uint8)
        return
    from tqdm import tqdm                                       # disable=None: a bar on a terminal only
    for text in tqdm(pieces(data), total=(len(data) >> 20) + 1, unit='MB', disable=None):
        yield np.array(encode(text, meta))


# ---- files -------------------------------------------------------------------------------------------------

def read(path):
    try:
        with open(path, 'rb') as f:
            return f.read()
    except OSError as e:
        raise ValueError(f'cannot read {path}: {e.strerror}') from None


def write(path, blocks):
    """Write blocks of bytes to path: whole under that name, or not there at all. Returns their sha256."""
    temp, digest = f'{path}.{os.getpid()}.tmp', hashlib.sha256()
    try:
        with open(temp, 'wb') as f:
            for block in blocks:
                f.write(block)
                digest.update(block)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    finally:
        if os.path.exists(temp):
            os.remove(temp)
    return digest.hexdigest()


def flaw(path, size, sha256):
    """What is wrong with a fetched file, in words, or None."""
    with open(path, 'rb') as f:
        head, found, bytes_ = f.read(512), hashlib.sha256(), os.path.getsize(path)
        if head.lstrip().lower().startswith((b'<!doctype html', b'<html')):
            return 'an HTML page in place of the file'
        if size and bytes_ != size:
            return f'{bytes_:,} bytes, not {size:,}'
        f.seek(0)
        while sha256 and (block := f.read(1 << 20)):
            found.update(block)
    if sha256 and found.hexdigest() != sha256:
        return f'sha256 is {found.hexdigest()}, not {sha256}'


def download(url, path, size=None, sha256=None, **headers):
    """Fetch url to path by way of path.part, where a later call goes on. requests honours HTTPS_PROXY."""
    import requests
    from tqdm import tqdm
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = path + '.part'
    headers = {**headers, 'Accept-Encoding': 'identity'}        # compressed, sizes would be of other bytes
    for attempt in range(4):
        time.sleep(attempt / 2)
        have, keep, problem = os.path.getsize(part) if os.path.exists(part) else 0, 0, None
        ask = headers | ({'Range': f'bytes={have}-'} if have else {})
        try:
            with requests.get(url, headers=ask, stream=True, timeout=(10, 30)) as r:
                span = re.match(r'bytes (\d+)-\d+/(\d+)', r.headers.get('Content-Range', ''))
                total = int(span[2] if span else r.headers.get('Content-Length') or size or 0)
                if r.status_code == 200 or r.status_code == 206 and span and int(span[1]) == have:
                    if 'html' in r.headers.get('Content-Type', ''):
                        raise ValueError(f'{url}: an HTML page in place of the file')
                    keep = have if r.status_code == 206 else 0  # 200: Range is ignored, all of it comes again
                    with open(part, 'ab' if keep else 'wb') as f, tqdm(
                            total=total, initial=keep, unit='B', unit_scale=True, disable=None) as bar:
                        for block in r.iter_content(1 << 14):   # a break loses less than one block
                            bar.update(f.write(block))
                        if f.tell() < total:
                            problem = f'the connection ended after {f.tell():,} of {total:,} bytes'
                elif r.status_code == 416 and have:             # nothing comes after what is here
                    keep = have
                elif r.status_code == 429 or r.status_code >= 500:
                    problem = f'HTTP {r.status_code} {r.reason}'
                else:
                    raise ValueError(f'{url}: HTTP {r.status_code} {r.reason}')
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as e:
            problem = f'the connection failed ({type(e).__name__})'
        except requests.RequestException as e:                  # bad URL, redirect loop: no use to try again
            raise ValueError(f'{url}: {type(e).__name__}: {e}') from None
        if not problem:
            problem = flaw(part, size, sha256)
            if not problem:
                os.replace(part, path)
                return
            os.remove(part)
            if not keep:                                        # else once more: the old part may be to blame
                raise ValueError(f'{url}: {problem} (deleted)')
    raise ValueError(f'{url}: {problem}')


def fetch(name, folder, url=None, file=None):
    """The file a set is made from: --file, or the one in its folder (also put by hand), or a download."""
    row = DATASETS[name]
    path = file or os.path.join(folder, row['urls'][0].rsplit('/', 1)[1])
    if file or os.path.exists(path):
        if not os.path.isdir(path) and (problem := flaw(path, row['size'], row['sha256'])):
            raise ValueError(f'{path} is not the file of {name}: {problem}; delete it, or replace it')
        return path
    problems = []
    for link in [url] if url else row['urls']:
        link = link.replace(HUB, (os.environ.get('HF_ENDPOINT') or HUB).rstrip('/'))
        try:
            download(link, path, row['size'], row['sha256'])
            return path
        except ValueError as e:
            problems.append(str(e))
    raise ValueError(f'{"; ".join(problems)}; try again, or put the file at {path} by hand (its sha256: '
                     f'{row["sha256"]})')


# ---- prepare and load --------------------------------------------------------------------------------------

def place(name, root, tokenizer):
    """The folder of a data set: by its name, by the content of a text file, or a prepared folder as it is."""
    if name in DATASETS:
        return os.path.join(root, name)
    if os.path.isfile(name):
        key = hashlib.sha256(read(name) + (tokenizer or 'byte').encode()).hexdigest()[:8]
        stem = re.sub('[^A-Za-z0-9_-]+', '_', os.path.splitext(os.path.basename(name))[0])[:40]
        return os.path.join(root, f'text-{stem}-{key}')
    if os.path.isdir(name):
        return name
    raise ValueError(f'no data set or file {name!r}; choose from {", ".join(DATASETS)}, or give the path of '
                     'a text file or a prepared folder')


def prepare(name, root=HERE, tokenizer=None, url=None, file=None):
    """Make a set anew; returns its folder. meta.json comes last: while it is missing, all is unfinished."""
    row = DATASETS.get(name, dict(help='a text of your own', tokenizer='byte', make=local_text))
    task, tokenizer = row['tokenizer'] == 'ids', tokenizer or row['tokenizer']
    if tokenizer not in (choices := ['ids'] if task else TOKENIZERS):
        raise ValueError(f'the tokenizer of {name} can be {" or ".join(choices)}, not {tokenizer!r}')
    if (url or file) and 'urls' not in row:
        raise ValueError(f'--{"url" if url else "file"} means nothing for {name}: it is not fetched')
    folder = place(name, root, tokenizer)
    try:
        print(f'preparing {folder} ({row["help"]}; tokenizer {tokenizer})', flush=True)
        meta = dict(name=os.path.basename(folder), tokenizer=tokenizer)
        if task:
            meta.update(vocab_size=row['vocab'], ignore=row['vocab'])
            for seed, (side, rows) in enumerate(zip(SIDES, row['rows'])):
                rng = np.random.Generator(np.random.Philox(seed))
                pair = row['make'](rows, rng, row['vocab'], side == 'train')
                meta['row'], meta[side] = pair[0].shape[1], dict(ids=[np.concatenate(pair, axis=1)])
        else:
            texts = row['make'](fetch(name, folder, url, file) if 'urls' in row else name)
            if not all(texts):
                raise ValueError('too short to be split into training and validation')
            if tokenizer == 'char':
                meta['chars'] = sorted({c for text in texts for piece in pieces(text) for c in set(piece)})
            if tokenizer == 'gpt2':
                gpt2()                                          # fails, if it must, before files are replaced
            meta['vocab_size'] = {'byte': 256, 'gpt2': 50257}.get(tokenizer) or len(meta['chars'])
            for side, text in zip(SIDES, texts):
                meta[side] = dict(bytes=len(text), ids=tokenize(text, meta))
        dtype = np.min_scalar_type(meta.get('ignore', meta['vocab_size'] - 1))
        meta['dtype'], path = dtype.name, os.path.join(folder, 'meta.json')
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(path):
            os.remove(path)
        for side in SIDES:
            data, arrays = os.path.join(folder, side + '.bin'), meta[side].pop('ids')
            meta[side]['sha256'] = write(data, (a.astype(dtype).tobytes() for a in arrays))
            meta[side]['tokens'] = os.path.getsize(data) // dtype.itemsize
        write(path, [json.dumps(meta, indent=1).encode()])
    except (OSError, ValueError) as e:                          # OSError: not allowed, disk full
        raise ValueError(f'cannot prepare {name}: {e}') from None
    return folder


def load(name, root=HERE, tokenizer=None):
    """(train, val, meta) of a data set by name, of a local text file or of a prepared folder by path.

    train and val are read-only memory maps. What is not there is prepared; what is broken raises ValueError.
    """
    folder = place(name, root, tokenizer)
    remedy = 'prepare it anew' if folder == name else f'delete {folder} to have it made anew'
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if folder == name:
            raise ValueError(f'{path} is missing: {name} is no prepared data set; give a name or a text file')
        prepare(name, root, tokenizer)

    try:
        meta = json.loads(read(path))
        kind, vocab, dtype = meta['tokenizer'], meta['vocab_size'], np.dtype(meta['dtype'])
        length, counts = meta.get('row', 0), [meta[side]['tokens'] for side in SIDES]
        if (kind not in (*TOKENIZERS, 'ids') or dtype.name not in ('uint8', 'uint16', 'uint32') or
                kind == 'char' and len(meta['chars']) != vocab or length and meta['ignore'] != vocab or
                vocab < 1 or any(n % (2 * length or 1) for n in counts) or
                not (length or all('bytes' in meta[side] for side in SIDES))):
            raise ValueError('its entries contradict each other')
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f'{path}: broken or incomplete ({type(e).__name__}: {e}); {remedy}') from None
    if tokenizer not in (None, kind):
        raise ValueError(f'{folder} is prepared with tokenizer {kind}, not {tokenizer}; to make it anew: '
                         f'python data/prepare.py {name} --tokenizer={tokenizer}')
    sides = []
    for side, count in zip(SIDES, counts):
        file = os.path.join(folder, side + '.bin')
        size = os.path.getsize(file) if os.path.isfile(file) else 0
        if not size or size != count * dtype.itemsize:
            found = f'has {size:,} bytes' if os.path.exists(file) else 'is missing'
            raise ValueError(f'{file} {found}, meta.json says {count * dtype.itemsize:,} bytes; {remedy}')
        data = np.memmap(file, dtype, 'r')
        inputs, targets = data.reshape(-1, 2, length).swapaxes(0, 1) if length else (data, data[:0])
        if (largest := inputs.max()) >= vocab or (largest := targets.max(initial=0)) > vocab:
            raise ValueError(f'{file}: holds token {largest}, the vocabulary ends at {vocab - 1}; {remedy}')
        sides.append(data)
    return *sides, meta


def same_tokens(a, b):
    """Whether two meta.json speak of the same tokens."""
    return all(a.get(k) == b.get(k) for k in ('tokenizer', 'vocab_size', 'chars', 'row'))


def load_like(path, meta, name, row, root=HERE):
    """(train, val, meta, name) of a text for a trained model: `name`, else what its checkpoint at `path` with
    metadata `meta` was trained on; in the same tokens, and longer than a row."""
    name, tokens = name or meta.get('args', {}).get('data'), meta['data'].get('tokenizer')
    if not name:
        raise ValueError(f'{path} does not say what it was trained on: give --data')
    train, val, data = load(name, root)
    if 'row' in data or not same_tokens(data, meta['data']):
        raise ValueError(f'--data={name}: no text, or not in the tokens of {path}, {tokens}; '
                         f'python data/prepare.py {name} --tokenizer={tokens}')
    if min(len(train), len(val)) <= row + 1:
        raise ValueError(f'--data={name}: too short for rows of {row} (convert.py: see --row)')
    return train, val, data, name


def main(argv=None):
    def error(message):                                         # one line, as for every other mistake
        raise ValueError(message)

    parser = argparse.ArgumentParser(description='Make a data set for train.py.', allow_abbrev=False)
    parser.error = error
    parser.add_argument('name', help='the path of a UTF-8 text file, or one of ' + '; '.join(
        f'{name}: {row["help"]} ({row["tokenizer"]})' for name, row in DATASETS.items()))
    parser.add_argument('--tokenizer', help=f'one of {", ".join(TOKENIZERS)}')
    parser.add_argument('--url', help='fetch from this mirror')
    parser.add_argument('--file', help='a local copy of what would be fetched (WikiText: also unpacked)')
    try:
        args = parser.parse_args(argv)
        if args.name in DATASETS or not os.path.isdir(args.name):
            prepare(**vars(args))
        train, val, meta = load(args.name, tokenizer=args.tokenizer)
    except ValueError as e:
        print(f'error: {e}', file=sys.stderr)
        return 2
    print(f'{len(train):,} training and {len(val):,} validation tokens, vocabulary {meta["vocab_size"]:,}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
