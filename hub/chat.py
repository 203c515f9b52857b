"""Conversations: messages, framed by a model's chat template, as tokens.

    text = rendered([{'role': 'user', 'content': 'Hi'}], data)          # what the template makes of it
    ids = token_ids(text, data)

A template is a program in Jinja that comes with the model. It runs in Jinja's sandbox.

What a user says never becomes a special token: each word of it that would be one is replaced by a private
character while the template is rendered, and is read as letters.
"""
import datetime
import functools
import json
import os
import re

from data import vocabulary
from hub.texts import TEMPLATE, named

PRIVATE = 0xf0000       # from here on, characters mean nothing in any text
MARKS = f'[{chr(PRIVATE)}-{chr(PRIVATE + 0xfffd)}]'
OTHER = PRIVATE + 0x8000    # those below stand for what a user wrote, these for special tokens


def marked(text, data):
    """The text with a private character in place of each word that would be read as a special token."""
    text = re.sub(MARKS, '\ufffd', text)
    for i, word in enumerate(longest_first(data)):
        text = text.replace(word, chr(PRIVATE + i))
    return text


def unmarked(text, data):
    """The inverse of `marked`."""
    for i, word in enumerate(longest_first(data)):
        text = text.replace(chr(PRIVATE + i), word)
    return text


def longest_first(data):
    """The special tokens' texts; one may be part of another."""
    return sorted(data.special, key=len, reverse=True)


@functools.lru_cache(4)
def compiled(template):
    """A chat template, as transformers compiles it."""
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(why):
        raise jinja2.TemplateError(why)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    def tojson(x, ensure_ascii=False, **how):
        return json.dumps(x, ensure_ascii=ensure_ascii, **how)

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what a model says, for training. Here it stands for what is inside."""
        tags = {'generation'}                           # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(('name:endgeneration',), drop_needle=True)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', Generation])
    env.filters['tojson'] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env.from_string(template)


def rendered(messages, data, ask=True):
    """The text that the chat template makes of messages, a list of {'role', 'content'}, as transformers
    would. ask: up to where the next answer begins. ValueError if there is no template, or it is broken or
    refuses them."""
    if not data.template:
        raise ValueError('--chat: this model brings no chat template; take one that was trained to chat, '
                         f'whose folder has {TEMPLATE}, or leave --chat out')
    names = {name: flags['content'] for name, flags in named(data.files or {}).items()}
    messages = [{**message, 'content': marked(message['content'], data)} for message in messages]
    try:
        return compiled(data.template).render(
            messages=messages, add_generation_prompt=ask, tools=None, documents=None, **names)
    except Exception as e:      # noqa: BLE001  a template may raise anything
        raise ValueError(f'the chat template does not take these messages: {type(e).__name__}: {e}') from None


@functools.lru_cache(4)
def with_other_marks(text, words):
    """A copy of the tokenizer of this tokenizer.json in which a private character, from OTHER on, stands for
    each special token in `words`. Then "<s>" is three letters, and chr(OTHER) is the token -> the copy, and
    {id in the copy: true id} of all added tokens"""
    raw = json.loads(text)
    others = {word: chr(OTHER + i) for i, word in enumerate(words)}
    for token in raw['added_tokens']:
        token['content'] = others.get(token['content'], token['content'])
    tokenizer = vocabulary.subwords(json.dumps(raw), special=True)
    called = {other: word for word, other in others.items()}
    true = vocabulary.subwords(text).token_to_id
    return tokenizer, {i: true(called.get(token.content, token.content))
                       for i, token in tokenizer.get_added_tokens_decoder().items()}


def token_ids(text, data):
    """Token ids of a rendered text."""
    words = tuple(longest_first(data))
    if not words or not re.search(MARKS, text):     # then the template alone has special tokens
        return vocabulary.encode(text, data, special=True)
    if not data.json:
        return vocabulary.encode(unmarked(text, data), data)
    tokenizer, true = with_other_marks(data.json, words)
    for i, word in enumerate(words):
        text = text.replace(word, chr(OTHER + i))
    ids = tokenizer.encode(unmarked(text, data), add_special_tokens=False).ids
    return vocabulary.in_vocabulary([true.get(i, i) for i in ids], data)


def answered(messages, data, none):
    """A conversation to learn from -> its token ids, and the target of each: the next token where that
    belongs to an answer or is the first that ends it, else `none`."""
    text = rendered(messages, data, ask=False)
    ids = token_ids(text, data)
    targets = [none] * len(ids)
    for i, message in enumerate(messages):
        if message['role'] == 'assistant':
            upto = rendered(messages[:i + 1], data, ask=False)
            if not text.startswith(upto):
                raise ValueError('the chat template changes an answer once another one follows; give '
                                 'conversations with one answer')
            before = token_ids(rendered(messages[:i], data), data)
            begin = max(1, len(os.path.commonprefix([ids, before])))
            for t in range(begin, len(os.path.commonprefix([ids, token_ids(upto, data)]))):
                targets[t - 1] = ids[t]
                if ids[t] in data.ends:
                    break
    return ids, targets
