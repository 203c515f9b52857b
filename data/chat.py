"""Conversations: messages, framed by a model's chat template, as tokens.

    text = rendered([{'role': 'user', 'content': 'Hi'}], data)          # what the template makes of it
    ids = vocabulary.encode(text, data, special=True)

A template is a program in Jinja that comes with the model. It runs in Jinja's sandbox.

What a user says never becomes a special token, see `tamed`.
"""
import datetime
import functools
import json
import os

from common.errors import note
from data import vocabulary
from data.special import TEMPLATE, named_tokens


@functools.cache
def tell(word, other):
    """Say it once."""
    note(f'{word} in what is said is read as {other}: special tokens are for the template')


def tamed(text, data):
    """The text, in which each word that would be read as a special token has another first letter."""
    for word in data.special:
        other = f'\ufffd{word[1:]}'
        while word in text and word != other:           # %% is in %%% twice
            tell(word, other)
            text = text.replace(word, other)
    return text


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
    names = {name: flags['content'] for name, flags in named_tokens(data.files or {}).items()}
    messages = [{**message, 'content': tamed(message['content'], data)} for message in messages]
    try:
        return compiled(data.template).render(
            messages=messages, add_generation_prompt=ask, tools=None, documents=None, **names)
    except Exception as e:      # noqa: BLE001  a template may raise anything
        raise ValueError(f'the chat template does not take these messages: {type(e).__name__}: {e}') from None


def answered(messages, data, none):
    """A conversation to learn from -> its token ids, and the target of each: the next token where that
    belongs to an answer or is the first that ends it, else `none`."""
    text = rendered(messages, data, ask=False)
    ids = vocabulary.encode(text, data, special=True)
    targets = [none] * len(ids)
    for i, message in enumerate(messages):
        if message['role'] == 'assistant':
            upto = rendered(messages[:i + 1], data, ask=False)
            if not text.startswith(upto):
                raise ValueError('the chat template changes an answer once another one follows; give '
                                 'conversations with one answer')
            before = vocabulary.encode(rendered(messages[:i], data), data, special=True)
            begin = max(1, len(os.path.commonprefix([ids, before])))
            after = vocabulary.encode(upto, data, special=True)
            for t in range(begin, len(os.path.commonprefix([ids, after]))):
                targets[t - 1] = ids[t]
                if ids[t] in data.ends:
                    break
    return ids, targets
