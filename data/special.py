"""The special tokens to which the files of a pretrained model give a name, such as bos_token.

    named_tokens({'tokenizer_config.json': '{"bos_token": "<s>"}'})['bos_token']['content']     # '<s>'

texts: {name: content} of such files, as `Data.files` has them.
"""
import contextlib
import json

TOKENIZER = 'tokenizer.json'
WORDS = 'vocab.json'                                            # with merges.txt it stood for tokenizer.json
TOKENIZER_CONFIG = 'tokenizer_config.json'
NAMED = 'special_tokens_map.json'
TEMPLATE = 'chat_template.jinja'


@contextlib.contextmanager
def as_the_hub(name):
    """ValueError, which begins with the name of a file or folder, if what it says cannot be used."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f'{name}: {e}') from None
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f'{name}: not as the hub has it ({type(e).__name__}: {e})') from None


def as_object(texts, name):
    """What a file says, a dict; {} if there is none. ValueError for other JSON"""
    with as_the_hub(name):
        return dict(json.loads(texts.get(name, '{}')))


def flags_of(word):
    """A special token, a text or a dict with flags, as tokenizers.AddedToken takes it."""
    flags = {'content': word, 'normalized': False}
    if isinstance(word, dict):
        flags = {**word}
    flags.pop('__type', None)
    flags['special'] = True
    return flags


def named_tokens(texts):
    """The special tokens that have a name: {'bos_token': its `flags_of`, ...}, from tokenizer_config.json and
    special_tokens_map.json. Of two that differ, the former's holds if it also lists tokens, else the
    latter's. With the older two files, a token without a name has that of transformers' class."""
    about = as_object(texts, TOKENIZER_CONFIG)
    others = as_object(texts, NAMED)
    both = {**about, **others}
    if 'added_tokens_decoder' in about:
        both = {**others, **about}
    if TOKENIZER not in texts and WORDS in texts:
        third = 'bos_token'
        if 'Qwen2' in str(about.get('tokenizer_class')):
            third = 'pad_token'
        both = dict.fromkeys(['unk_token', 'eos_token', third], '<|endoftext|>') | both
    found = {}
    for name, word in both.items():
        if name.endswith('_token') and type(word) in (str, dict):
            found[name] = flags_of(word)
    return found
