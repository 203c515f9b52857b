"""What a pretrained folder's text is: its tokenizer, its special tokens, the tokens that end a text.

    data = tokenizer_of('FOLDER', 49152)                # a Data: its tokens
    add_texts('FOLDER', data, 2)                        # and what a chat needs
"""
import contextlib
import json
import os

from common import files
from common.errors import note
from common.flags import plural
from data import vocabulary
from data.kinds import Data


TOKENIZER_CONFIG = 'tokenizer_config.json'
TEMPLATE = 'chat_template.jinja'
GENERATION_CONFIG = 'generation_config.json'
CHAT_FILES = TOKENIZER_CONFIG, TEMPLATE, GENERATION_CONFIG
TOKENIZER_FILES = 'tokenizer.json', 'vocab.json', 'merges.txt'     # an export gives them back as they were
TOKENIZER, *OLDER = TOKENIZER_FILES            # the older two stood together for the first


def parsed(path, name, use):
    """Read a JSON file -> use(its content). ValueError if it is broken, or has content that `use` cannot
    read. name: of the file, for messages"""
    content = files.read_file(path)
    with as_the_hub(name):
        return use(json.loads(content))


@contextlib.contextmanager


def as_the_hub(name):
    """ValueError, which begins with the name of a file or folder, if what it says cannot be used."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f'{name}: {e}') from None
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f'{name}: not as the hub has it ({type(e).__name__}: {e})') from None


def tokenizer_of(folder, vocab):
    """The description of the tokens of a model with `vocab` tokens, from the folder's own files. If there are
    none, tokens are only numbers. ValueError for a tokenizer that does not work, or not with this model."""
    path, words, merges = (os.path.join(folder, name) for name in (TOKENIZER, *OLDER))
    if os.path.exists(path):
        text = files.as_utf8(files.read_file(path), path)
    elif os.path.exists(words) and os.path.exists(merges):
        pairs = files.as_utf8(files.read_file(merges), merges)
        path = f'{words} with {OLDER[1]}'
        text = parsed(words, path, lambda words: json.dumps(byte_level(words, pairs)))
    else:
        note(f'{path} is missing, and {" with ".join(OLDER)}, too: tokens are only numbers')
        return Data('ids', vocab)
    with as_the_hub(path):
        if is_gpt2(json.loads(text)) and vocab == 50257:
            return Data('gpt2', vocab)
    vocabulary.package()                                       # outside try: the file is not to blame
    data = Data('json', vocab, json=text)
    try:
        ids = set(vocabulary.subwords(text).get_vocab().values())
        if len(ids) != vocab or max(ids) >= vocab:
            note(f'{path} has {plural(len(ids), "token")}, the model {vocab:,}: a text with one that the '
                 'model lacks is refused')
        before, behind = vocabulary.frame(data)
        highest = max(before + behind, default=0)
        if highest >= vocab:
            raise ValueError(f'it puts token {highest} around a text, the model has {vocab:,}')
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path}: {e}; replace it by the file of this model, or take it away: then tokens '
                         'are only numbers') from None
    return data


def is_gpt2(raw):
    """Whether the content of a tokenizer.json is GPT-2's. Then tiktoken reads the same tokens, and needs no
    other package."""
    ids = dict(raw['model']['vocab'])
    tokens = sorted(ids, key=ids.get)[:50256]
    same = files.short_hash('\n'.join(tokens).encode()) == '3a1f1c01'
    more = len(ids) > 50257 or len(raw.get('added_tokens', [])) > 1         # the one is <|endoftext|>
    spaced = (raw.get('pre_tokenizer') or {}).get('add_prefix_space')
    return same and not (more or spaced or raw.get('normalizer'))


def byte_level(words, merges):
    """The content of a tokenizer.json from the two files that stood for it before: GPT-2's way to merge pairs
    of bytes. words: {token: id}; merges: a text with a pair of tokens in each line, the first first"""
    lines = merges.removeprefix('\ufeff').split('\n')
    pairs = [line.split() for line in lines if line.strip() and not line.startswith('#version')]
    model = {'type': 'BPE', 'vocab': words, 'merges': pairs}
    in_bytes = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
    return {'model': model, 'pre_tokenizer': in_bytes, 'decoder': in_bytes}


def add_texts(folder, data, config_ends):
    """Add to data what a folder says of conversations: its template, special tokens, ends of text, and its
    files. config_ends: eos_token_id of its config.json"""
    data.files = {}
    names = CHAT_FILES + TOKENIZER_FILES
    if data.json and os.path.exists(os.path.join(folder, TOKENIZER)):
        names = CHAT_FILES                                      # data has the tokenizer already, as `json`
    for name in names:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            data.files[name] = files.as_utf8(files.read_file(path), path)
    special = {}
    if data.tokenizer == 'gpt2':
        special = {'<|endoftext|>': 50256}
    for token in added_tokens(data):
        if token.get('special'):                                # others are words, which texts may have
            special[token['content']] = token['id']
    data.special = {word: i for word, i in special.items() if word and i < data.vocab_size}
    about = as_object(data.files.get(TOKENIZER_CONFIG, '{}'), TOKENIZER_CONFIG)
    generation = as_object(data.files.get(GENERATION_CONFIG, '{}'), GENERATION_CONFIG)
    template = data.files.get(TEMPLATE) or about.get('chat_template') or ''
    if isinstance(template, list):                              # several, by name
        template = {one.get('name'): one.get('template') for one in template}.get('default', '')
    data.template = template
    ends = []
    named = data.special.get(named_tokens(about).get('eos_token'))
    for some in config_ends, generation.get('eos_token_id'), named:
        ends += some if isinstance(some, list) else [some]
    data.ends = sorted({i for i in ends if type(i) is int and 0 <= i < data.vocab_size})


def added_tokens(data):
    """The entries of tokenizer.json about tokens beside the learned ones."""
    return json.loads(data.json or '{}').get('added_tokens') or []


def as_object(text, name):
    """A JSON text -> a dict. ValueError, with the name of its file, if it is none"""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f'{name}: {e}; get it anew') from None


def named_tokens(about):
    """The special tokens that a tokenizer_config.json names: {'bos_token': '<s>', ...}"""
    words = {}
    for name, word in about.items():
        if isinstance(word, dict):                              # with flags
            word = word.get('content')
        if name.endswith('_token') and isinstance(word, str):
            words[name] = word
    return words
