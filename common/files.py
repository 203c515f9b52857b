"""Files: read as they are, written whole or not at all, downloaded and checked.

    with atomic('out/x.bin') as temp:       # write the file temp; at the end it becomes out/x.bin in one step
        write_blocks(temp, [b'all', b'of it'])
    write_json('out/result.json', {'loss': 1.5})
"""
import contextlib
import hashlib
import json
import os
import sys
import tempfile

import numpy as np


def read_file(path):
    """The bytes of a file."""
    with open(path, 'rb') as f:
        return f.read()


def as_utf8(data, name):
    """Bytes -> text as it is, also CR and NUL. ValueError, with the name, if it is in another encoding."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f'{name}: not UTF-8 at byte {e.start:,}; unpack it first or, if it is in another '
                         'encoding, convert it: iconv -f WINDOWS-1252 -t UTF-8 (or -f UTF-16)') from None


def lies_in(path, folder):
    """Whether `path` is a file directly in `folder`, or is `folder` itself."""
    if os.path.isfile(path):
        path = os.path.dirname(os.path.realpath(path))
    return os.path.realpath(path) == os.path.realpath(folder)


def make_room(path):
    """Make the folder of a file that will be written. ValueError if the path is a folder"""
    if os.path.isdir(path):
        raise ValueError(f'{path}: a folder; give the name of a file')
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)


def text_of(given):
    """The text that a flag stands for: itself, @file, - for standard input."""
    if given == '-':
        return as_utf8(sys.stdin.buffer.read(), 'standard input')
    if given.startswith('@'):
        path = os.path.expanduser(given[1:])
        return as_utf8(read_file(path), path)
    return given


def lines_of(given):
    """The lines of the text that a flag stands for, as in training: only ASCII line ends end a line."""
    data = text_of(given).removeprefix('\ufeff').encode('utf-8', 'surrogateescape')
    return [line.decode('utf-8', 'surrogateescape') for line in data.splitlines()]


def short_hash(data):
    """Eight hexadecimal digits of a hash of data, for the name of a folder."""
    return hashlib.sha256(data).hexdigest()[:8]


@contextlib.contextmanager
def atomic(path):
    """`with atomic(path) as temp:` write the file temp, and it becomes path in one step. A reader finds
    either the old file or the new one, even after a crash. A failure leaves only the old file. The new file
    is synced to disk before it is renamed, and gets the old one's permissions."""
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # The new file lies in a folder of its own, as safetensors writes a hidden file beside it first. A killed
    # process leaves the folder, whose name says what it is (train.log_of removes it).
    with tempfile.TemporaryDirectory('.part', f'{name}.', folder) as own:
        temp = os.path.join(own, 'new')
        open(temp, 'wb').close()                                # with the permissions of the umask
        mode = os.stat(path if os.path.exists(path) else temp).st_mode
        yield temp
        with open(temp, 'rb+') as f:
            os.fsync(f.fileno())
        os.chmod(temp, mode & 0o777)
        os.replace(temp, path)


def write_blocks(path, blocks):
    """Write blocks of bytes to a file -> its sha256."""
    digest = hashlib.sha256()
    with open(path, 'wb') as f:
        for block in blocks:
            f.write(block)
            digest.update(block)
    return digest.hexdigest()


def write_file(path, blocks):
    """Write blocks of bytes to a file, through `atomic`: all of them, or none."""
    with atomic(path) as temp:
        write_blocks(temp, blocks)


def write_json(path, content):
    """Write an object as JSON, through `atomic`."""
    write_file(path, [json.dumps(content, indent=1).encode()])


def check_file(path, name, sha256):
    """ValueError, which begins with `name`, if a file has not this sha256. None: not known"""
    if sha256:
        data = np.memmap(path, mode='r') if os.path.getsize(path) else b''      # mapped: may be gigabytes
        digest = hashlib.sha256(data).hexdigest()
        if digest != sha256:
            raise ValueError(f'{name}: sha256 is {digest}, not {sha256}')


TIMEOUT = 10, 30        # seconds that requests waits for a connection, and for the next bytes


def download(links, path, sha256=None):
    """Download path from the first link that has the right file. ValueError if none has: each is missing, or
    has another sha256. requests honours HTTPS_PROXY."""
    import requests
    problems = []
    for link in links:
        try:
            with atomic(path) as temp:
                receive(link, temp)
                check_file(temp, link, sha256)
            return
        except requests.RequestException as e:
            problems.append(f'{link}: {type(e).__name__}: {str(e)[:100]}')
        except ValueError as e:
            problems.append(str(e))
    raise ValueError(f'{"; ".join(problems)}; try again, or put the file at {path} by hand (its sha256: '
                     f'{sha256 or "not known"})')


def receive(url, path):
    """Download url to a file. requests.RequestException if fewer bytes come than announced."""
    import requests
    from tqdm import tqdm
    headers = {'Accept-Encoding': 'identity'}                   # uncompressed, or sizes do not match
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply, open(path, 'wb') as f:
        reply.raise_for_status()
        total = int(reply.headers.get('Content-Length', 0))
        with tqdm(total=total, unit='B', unit_scale=True, disable=None) as bar:
            for block in reply.iter_content(1 << 14):
                bar.update(f.write(block))
