"""What a pretrained folder's text is: its tokenizer, its special tokens, the tokens that end a text.

    data = tokenizer_of('FOLDER', 49152)                # a Data
    add_texts('FOLDER', data, 2)                        # and what a chat needs

Several files have a say, and older folders lack some of them. We read what transformers reads:
tokenizer.json, or vocab.json with merges.txt; further tokens in tokenizer_config.json or added_tokens.json;
the names of special tokens in tokenizer_config.json or special_tokens_map.json. One difference: some classes
of transformers 5 (LlamaTokenizer, Qwen2Tokenizer, BertTokenizer without do_lower_case) replace the way in
which tokenizer.json treats spaces, accents or capital letters; here it holds.
"""
import json
import os

from common import files
from common.errors import note, of_package
from data import vocabulary
from data.kinds import Data
from data.special import (NAMED, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, WORDS, as_object, as_the_hub,
                          flags_of, named_tokens)

MERGES = 'merges.txt'
OLDER = WORDS, MERGES                                           # they stood together for tokenizer.json
ADDED = 'added_tokens.json'
GENERATION_CONFIG = 'generation_config.json'
TEXT_FILES = TOKENIZER, *OLDER, TOKENIZER_CONFIG, ADDED, NAMED, TEMPLATE, GENERATION_CONFIG
LISTS = 'additional_special_tokens', 'extra_special_tokens'     # of special tokens without a name
BY_THEM = (f'transformers writes {TOKENIZER} from other files: '
           'AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)')
OF_BERT = {'do_lower_case': 'lowercase', 'strip_accents': 'strip_accents',
           'tokenize_chinese_chars': 'handle_chinese_chars'}    # entries of tokenizer_config.json
# How a text is split before pairs are merged, by the tokenizer_class of folders with the older files. None is
# GPT-2's way, which the package calls ByteLevel. Qwen2's pattern: arXiv:2407.10671 has the same tokenizer as
# Qwen (arXiv:2309.16609, Sec. 2.2), whose digits are single.
SPLITS = {'GPT2Tokenizer': None, 'Qwen2Tokenizer': (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+")}


def parsed(path, use):
    """Read a JSON file -> use(its content). ValueError, with its path, if `use` cannot read what it says."""
    content = files.read_file(path)
    with as_the_hub(path):
        return use(json.loads(content))


def read_texts(folder):
    """{name: content} of those of TEXT_FILES that a folder has; beside tokenizer.json without OLDER."""
    found = {}
    for name in TEXT_FILES:
        path = os.path.join(folder, name)
        if os.path.exists(path) and not (name in OLDER and TOKENIZER in found):
            found[name] = files.as_utf8(files.read_file(path), path)
    return found


# ---- the tokenizer -----------------------------------------------------------------------------------------

def tokenizer_of(folder, vocab):
    """The description of the tokens of a model with `vocab` tokens, from the folder's own files. If there are
    none, tokens are only numbers. If the tokenizer puts a token before each text, it is `bos`. ValueError for
    a tokenizer that does not work, or not with this model."""
    texts = read_texts(folder)
    path = os.path.join(folder, TOKENIZER)
    if TOKENIZER not in texts and not texts.keys() >= {*OLDER}:
        note(f'{path} is missing, and {" with ".join(OLDER)}, too: tokens are only numbers. {BY_THEM}')
        return Data('ids', vocab)
    if TOKENIZER not in texts:
        path = f'{os.path.join(folder, WORDS)} with {MERGES}'
    try:
        with as_the_hub(path):
            data = Data('json', vocab, json=whole_tokenizer(texts), marks=True)
            before, behind = vocabulary.frame(data)
            highest = max(before + behind, default=0)
            if highest >= vocab:
                raise ValueError(f'it puts token {highest} around a text, the model has {vocab:,}')
    except ValueError as e:
        raise ValueError(f'{e}; replace it by the file of this model, or take it away: then tokens are only '
                         'numbers') from None
    if len(before) == 1:                                        # rows have no room for several
        [data.bos] = before
    return data


def whole_tokenizer(texts):
    """The content of a tokenizer.json that says all that these files say; itself, if they say no more."""
    from tokenizers import models, normalizers
    about = as_object(texts, TOKENIZER_CONFIG)
    content = texts.get(TOKENIZER) or byte_level(texts, about).to_str()
    tokenizer = vocabulary.read_tokenizer(content)
    before = tokenizer.to_str()
    there = {token['content']: token for token in json.loads(content).get('added_tokens') or []}
    further, ids = further_tokens(texts, about, there)
    ids.update({word: token['id'] for word, token in there.items()})
    how = {ours: about[theirs] for theirs, ours in OF_BERT.items() if theirs in about}
    with of_package('its tokens do not fit together'):
        tokenizer.add_tokens(further)
        for word, i in ids.items():
            if tokenizer.token_to_id(word) != i:                # the package numbers them without gaps
                raise ValueError(f'{word} is to be token {i}, but would be {tokenizer.token_to_id(word)}')
        is_bert = 'Bert' in (about.get('tokenizer_class') or 'Bert')
        if how and is_bert and isinstance(tokenizer.model, models.WordPiece):
            tokenizer.normalizer = normalizers.BertNormalizer(**how)
        if TOKENIZER not in texts:                              # else that says what stands around a text
            around(tokenizer, about, named_tokens(texts))
    after = tokenizer.to_str()
    return content if after == before else after


def byte_level(texts, about):
    """A tokenizer from the two files that stood for it before: pairs of bytes are merged, the first line of
    merges.txt first. about: tokenizer_config.json"""
    kind = (about.get('tokenizer_class') or 'GPT2Tokenizer').removesuffix('Fast')
    if kind not in SPLITS:
        raise ValueError(f'how {kind} splits a text is not known here. {BY_THEM}')
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    lines = texts[MERGES].removeprefix('\ufeff').split('\n')
    pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith('#version')]
    with of_package('no description of a tokenizer'):
        tokenizer = Tokenizer(models.BPE(json.loads(texts[WORDS]), pairs))
    spaced = bool(about.get('add_prefix_space'))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=SPLITS[kind] is None)
    tokenizer.pre_tokenizer = bytes_of
    tokenizer.decoder = decoders.ByteLevel()
    if SPLITS[kind]:
        split = pre_tokenizers.Split(Regex(SPLITS[kind]), 'isolated')
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def further_tokens(texts, about, there):
    """The tokens that files beside tokenizer.json list, or name as special -> a list of
    tokenizers.AddedToken, in the order in which they are added; the ids that the files give, {text: id}.
    there: {text: entry} of tokenizer.json; a token that is only named keeps the flags it has there"""
    import tokenizers
    map_of = as_object(texts, NAMED)
    unnamed = [word for name in LISTS for word in listed_in(about, name) or listed_in(map_of, name)]
    special = {}
    for flags in [*named_tokens(texts).values(), *map(flags_of, unnamed)]:
        word = flags['content']
        special[word] = {**there.get(word, flags), 'special': True}
        special[word].pop('id', None)
    listed = about.get('added_tokens_decoder')
    if listed is None:
        listed = {i: {'content': word, 'normalized': word not in special}
                  for word, i in as_object(texts, ADDED).items()}
    ids = {entry['content']: int(i) for i, entry in listed.items()}
    entries = [listed[i] for i in sorted(listed, key=int)]
    for entry in entries:
        entry['special'] = entry.get('special', False) or entry['content'] in special
    entries += [flags for word, flags in special.items() if word not in ids]
    return [tokenizers.AddedToken(**entry) for entry in entries], ids


def listed_in(about, name):
    """The special tokens of one of LISTS, which may stand by name."""
    some = about.get(name) or []
    return list(some.values()) if isinstance(some, dict) else some


def around(tokenizer, about, special):
    """Put BOS before a text, and EOS behind it, or neither, as tokenizer_config.json says."""
    import tokenizers
    before, behind = ([special[name]['content']] if about.get(f'add_{name}') else []
                      for name in ('bos_token', 'eos_token'))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*before, '$A', *behind],
        special_tokens=[(word, tokenizer.token_to_id(word)) for word in before + behind])


# ---- what a chat needs -------------------------------------------------------------------------------------

def add_texts(folder, data, config_ends):
    """Add to data what a folder says of conversations: its template, special tokens, ends of text, and its
    files. config_ends: eos_token_id of its config.json"""
    texts = read_texts(folder)
    data.files = {name: text for name, text in texts.items() if text != data.json}      # that is kept anyway
    data.special = {token.content: i for i, token in added_tokens(data).items()
                    if token.special and i < data.vocab_size}   # others are words, which texts may have
    about = as_object(texts, TOKENIZER_CONFIG)
    template = texts.get(TEMPLATE) or about.get('chat_template') or ''
    if isinstance(template, list):                              # several, by name
        template = {one.get('name'): one.get('template') for one in template}.get('default', '')
    data.template = template
    ends = []
    eos = named_tokens(texts).get('eos_token', {}).get('content')
    for some in config_ends, as_object(texts, GENERATION_CONFIG).get('eos_token_id'), data.special.get(eos):
        ends += some if isinstance(some, list) else [some]
    data.ends = sorted({i for i in ends if type(i) is int and 0 <= i < data.vocab_size})


def added_tokens(data):
    """{id: tokenizers.AddedToken} of the tokens beside the learned ones."""
    if not data.json:
        return {}
    return vocabulary.subwords(data.json).get_added_tokens_decoder()
