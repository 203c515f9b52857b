"""Text <-> token ids, by the description of a set's or a model's tokens.

    encode('to be', Data('byte', 256))          # [116, 111, 32, 98, 101]

Tokenizers: byte; gpt2; char and words (separated by spaces) list their tokens in `chars`; bpe:N and json (of
a hub model) keep a tokenizer.json in `json`; ids are numbers that stand for no text.
"""
import contextlib
import functools
import json
import re

import numpy as np

from common.errors import note, of_package
from common.flags import plural

FIXED = ('ids', 'words')                                        # a set in one of these has no other tokenizer
TOKENIZERS = ('byte', 'char', 'gpt2')                           # and bpe:N, for N in LEARNED
LEARNED = range(257, 65537)                                     # 256 bytes and the learned tokens
LONG_WORD = r'(\S{1000})'                                       # longer words are split: they take hours
LOOK_BACK = 16                          # so many tokens before others help to decode these
OF_TEXTS = f'{", ".join(TOKENIZERS)} or bpe:N, N from {LEARNED[0]} to {LEARNED[-1]:,}'


def gpt2():
    """GPT-2's tokenizer, downloaded once (1.5 MB), into TIKTOKEN_CACHE_DIR if that is set."""
    import tiktoken
    return tiktoken.get_encoding('gpt2')


def read_tokenizer(text):
    """The tokenizer that the text of a tokenizer.json describes. ValueError if it describes none"""
    import tokenizers
    with of_package('no description of a tokenizer'):
        return tokenizers.Tokenizer.from_str(text)


@functools.lru_cache(4)
def subwords(text, special=False):
    """The same, kept, to read whole texts. special: it reads "<s>" as a special token, not as three
    characters"""
    tokenizer = read_tokenizer(text)
    tokenizer.encode_special_tokens = not special
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def learn_tokenizer(data, size):
    """Learn `size` tokens from UTF-8 data by byte pair encoding (Sennrich 2016, arXiv:1508.07909), or fewer
    if no more pairs repeat -> the text of a tokenizer.json. Bytes and words are treated as in GPT-2."""
    import tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizer.pre_tokenizer.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    parts = (part for text in pieces(data) for part in re.split(LONG_WORD, text))
    tokenizer.train_from_iterator(parts, trainer)
    return tokenizer.to_str()


@functools.lru_cache(4)
def ids_of(units):
    """{text of a token: its id}. Kept, as a set may have thousands of tokens, and encode a text a line."""
    return {unit: i for i, unit in enumerate(units)}


def encode(text, meta, special=False):
    """Text -> token ids, by the meta of a data set or a checkpoint. A text of ids is numbers separated by
    spaces; a text of words is anything separated by spaces. special: read special tokens as such"""
    kind = meta.tokenizer
    if kind == 'byte':
        return list(text.encode('utf-8', 'surrogateescape'))    # keeps stray bytes from a terminal
    if kind == 'gpt2':
        return gpt2().encode(text, allowed_special='all' if special else set(), disallowed_special=())
    if meta.json:
        text = text.encode('utf-8', 'replace').decode()         # stray bytes become question marks
        with of_package('its tokenizer cannot read this text'):
            tokenizer = subwords(meta.json, special)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        return in_vocabulary(ids, meta)
    if kind in FIXED:
        text = text.split()
    if kind == 'ids':
        if not all(map(str.isdecimal, text)):
            raise ValueError('its tokens are only numbers, as in --prompt="7 8"')
        return in_vocabulary(list(map(int, text)), meta)
    ids = ids_of(tuple(meta.chars))
    unknown = sorted({unit for unit in text if unit not in ids})
    if unknown:
        words = ' or '.join(repr(u[:20]) for u in unknown[:10])
        raise ValueError(f'there is no token for {words}')
    return [ids[unit] for unit in text]


def in_vocabulary(ids, meta):
    """The ids. ValueError if the model has no such token"""
    if max(ids, default=0) >= meta.vocab_size:
        raise ValueError(f'this text has token {max(ids)}, beyond the vocabulary of {meta.vocab_size}')
    return ids


def frame(meta):
    """The tokens that tokenizer.json puts before and after a text: [BOS] and [], or [CLS] and [SEP]."""
    if not meta.json:
        return [], []
    tokenizer = subwords(meta.json)
    with of_package('its tokenizer cannot frame a text'):
        token = tokenizer.encode('', add_special_tokens=False)
        token.truncate(0)                                       # some tokenizers make a space of no text
        token.pad(1)                                            # padding is told by its attention mask
        framed = tokenizer.post_process(token)
    at = framed.attention_mask.index(0)
    return framed.ids[:at], framed.ids[at + 1:]


def whole_text(text, meta):
    """Token ids of a text with the special tokens around it, as a classifier reads it."""
    before, behind = frame(meta)
    return before + encode(text, meta) + behind


def with_bos(tokens, meta):
    """The tokens of a prompt, made into the beginning of a text: with BOS, if tokenizer.json puts it there.
    An empty prompt becomes a line end or, if the set has none, token 0."""
    before, _ = frame(meta)
    if tokens[:len(before)] != before:              # --special may have read it
        tokens = before + tokens
    if not tokens:
        with contextlib.suppress(ValueError):
            tokens = encode('\n', meta)[:1]
    return tokens or [0]


def source_rows(texts, meta):
    """N source texts -> token ids (N, longest) for the encoder, filled up with pad. ValueError for a text
    that is empty or has more than meta.source tokens."""
    most = meta.source
    rows = []
    for number, text in enumerate(texts, 1):
        text = text.strip()
        tokens = whole_text(text, meta)
        if not text or len(tokens) > most:
            raise ValueError(f'text {number} has {len(tokens)} tokens, expected 1 to {most}: {text[:30]!r}; '
                             'leave it out, or cut it into sentences')
        rows.append(tokens)
    if not rows:
        raise ValueError('there is no text to translate')
    longest = max(map(len, rows))
    return np.array([row + [meta.pad] * (longest - len(row)) for row in rows])


def decode(tokens, meta):
    """Token ids -> text, without padding. Bytes that are not UTF-8 become replacement characters."""
    pad = None if meta.is_joined else meta.pad
    tokens = [int(t) for t in tokens if t != pad]
    kind = meta.tokenizer
    if kind == 'byte':
        return bytes(tokens).decode('utf-8', 'replace')
    if kind == 'gpt2':
        return gpt2().decode(tokens)
    if meta.json:
        with of_package('its tokenizer cannot write these tokens'):
            return subwords(meta.json).decode(tokens, skip_special_tokens=False)
    if kind == 'ids':
        return ' '.join(map(str, tokens))
    words = [meta.chars[t] for t in tokens]
    return (' ' if kind == 'words' else '').join(words)


def added(before, tokens, meta):
    """The text that tokens add to the text of those before. Some decoders drop the blank before the first
    word, so both are decoded together."""
    seen = decode(before, meta)
    if seen.endswith('\ufffd'):                     # with part of a character before, the next may break, too
        return decode(tokens, meta)
    return decode(before + tokens, meta)[len(seen):]


# Most tokenizers split before a space between two letters, both ASCII or both of two bytes, as in Greek. Any
# may join line ends and punctuation. A text without such spaces, as in Chinese, is read whole.
BETWEEN = re.compile(rb'(?<=[A-Za-z]) (?=[A-Za-z])|(?<=[\xc3-\xdf].) (?=[\xc3-\xdf])', re.S)
PHRASE = re.compile('[A-Za-z][ \u0120\u2581]')                   # a token that spans such a place


def pieces(data, size=1 << 20):
    """Cut UTF-8 data at BETWEEN into strings of about a megabyte, so that memory stays bounded."""
    start = 0
    while start < len(data):
        cut = BETWEEN.search(data, start + size)
        end = cut.start() if cut else len(data)
        yield data[start:end].decode()
        start = end


def tokenize(data, meta, size=1 << 20):
    """Yield arrays of token ids; joined, they are the tokens of data. Some tokenizers add a space before what
    they read, so each piece is read together with the letter before it."""
    if meta.tokenizer == 'byte':                                # no decoding: the stdlib need not be UTF-8
        yield np.frombuffer(data, np.uint8)
        return
    from tqdm import tqdm
    if meta.json and any(map(PHRASE.search, subwords(meta.json).get_vocab())):
        size = len(data)                                        # no place is safe to cut at
    letter = ''
    for text in tqdm(pieces(data, size), total=len(data) // size + 1, unit='MB', disable=None):
        tokens = after(letter, text, meta, meta.marks)
        if tokens is None:
            raise ValueError(f'this tokenizer reads {letter!r} in another way before {text[:20]!r}')
        yield np.array(tokens)
        letter = text[-1]


def after(before, text, meta, special=False):
    """The token ids of a text that follows the text `before`. None if a token begins in one and ends in the
    other. special: as for `encode`"""
    seen = encode(before, meta, special)
    tokens = encode(before + text, meta, special)
    if tokens[:len(seen)] == seen:
        return tokens[len(seen):]
    return None


def continued(text, tokens, meta, special=False):
    """The token ids of a text that follows these tokens. Some tokenizers add a space before what they
    read, and some read "'s" as one token only after a letter. So we read the text behind what stands there
    or, if a token would span the border, behind what no token joins to it. special: as for `encode`"""
    if meta.tokenizer not in FIXED:
        for before in decode(tokens, meta), '\n', 'a':
            found = after(before, text, meta, special) if before else None
            if found is not None:
                return found
    return encode(text, meta, special)


@functools.lru_cache(4)
def unknown_id(text):
    """The id that stands for letters without a token, in a tokenizer.json. None: a byte always has one"""
    import tokenizers
    about = json.loads(text)['model']
    tokenizer = subwords(text)
    if tokenizer.get_vocab().keys() >= {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}:
        return None
    if about.get('unk_token'):
        return tokenizer.token_to_id(about['unk_token'])
    return about.get('unk_id')


def tell_lost(tokens, meta, where=''):
    """Say how many of these tokens stand for letters that the tokenizer does not know."""
    unknown = unknown_id(meta.json) if meta.json else None
    if unknown is None:
        return
    lost = np.count_nonzero(np.asarray(tokens) == unknown)
    if lost:
        note(f'{where}{lost:,} of {plural(len(tokens), "token")} stand for letters that the tokenizer does '
             'not know. These are lost')


def learn_tokens(sides, meta):
    """Put the vocabulary of these texts (one per side) into meta: vocab_size and, if they are not there yet,
    the characters or the subwords."""
    if not all(sides):
        raise ValueError('too short to be split into training and validation')
    kind = meta.tokenizer
    if kind == 'byte':
        meta.vocab_size = 256
    if kind == 'gpt2':
        meta.vocab_size = gpt2().n_vocab                     # may fail, so before files are replaced
    if kind == 'char':
        if not meta.chars:
            meta.chars = sorted({c for text in sides for piece in pieces(text) for c in piece})
        meta.vocab_size = len(meta.chars)
    if kind.startswith('bpe:') and not meta.json:          # a model's vocab_size may be larger: keep it
        meta.json = learn_tokenizer(sides[0], int(kind.removeprefix('bpe:')))
        meta.vocab_size = subwords(meta.json).get_vocab_size()
