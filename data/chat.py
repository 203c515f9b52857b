"""Conversations: a model's chat template, its special tokens, the tokens that end a text.

    data.update(of_folder('FOLDER', data))              # they stay with the tokens' description
    text = rendered([{'role': 'user', 'content': 'Hi'}], data)          # what the template makes of it
    ids = tokens(text, data)

A template is a program in Jinja that comes with the model, and may be hostile. It runs in Jinja's sandbox,
in a process of its own (this file, as a script), for SECONDS, in MEMORY, and makes a text of SIZE at most.

What a user says never becomes a special token. MARK is put into every word of it that would be one, and taken
out again when the text around has been cut at its special tokens.
"""
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys

if __package__:             # not in the process that renders: on many cores, numpy alone would take MEMORY
    from data import prepare

SECONDS = 5
MEMORY = 2 ** 30
SIZE = 10 ** 6
MARK = '\ue000'         # a private character: it means nothing in any text
TOKENS = 'tokenizer_config.json'
TEMPLATE = 'chat_template.jinja'
ENDS = 'generation_config.json'
FILES = TOKENS, TEMPLATE, ENDS
KEPT = 'tokenizer.json', 'vocab.json', 'merges.txt'     # with these, an export gives them back as they were
TRAVELS = 'template', 'special', 'ends', 'files'        # what a checkpoint keeps, beside its tokens


def of_folder(folder, data, config_ends):
    """What a folder says of conversations. data: the description of its tokens; config_ends: eos_token_id of
    its config.json  ->  dict of template (text), special {text: id}, ends (ids), files {name: text}"""
    files = {}
    for name in FILES + KEPT:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            files[name] = prepare.as_utf8(prepare.read_file(path), path)
    special = {}
    if data['tokenizer'] == 'gpt2':
        special = {'<|endoftext|>': 50256}
    if 'json' in data:
        for token in json.loads(data['json']).get('added_tokens') or []:
            special[token['content']] = token['id']
    special = {word: i for word, i in special.items() if word and i < data['vocab_size']}
    about, generation = (as_object(files.get(name, '{}'), name) for name in (TOKENS, ENDS))
    if 'json' in data:                                          # that one is kept there
        files.pop(KEPT[0], None)
    template = files.get(TEMPLATE) or about.get('chat_template') or ''
    if isinstance(template, list):                              # several, by name
        template = {one.get('name'): one.get('template') for one in template}.get('default', '')
    by_name = special.get(named(about).get('eos_token'))
    given = [config_ends, generation.get('eos_token_id'), by_name]
    ends = []
    for some in given:
        ends += some if isinstance(some, list) else [some]
    ends = sorted({i for i in ends if type(i) is int and 0 <= i < data['vocab_size']})
    return {'template': str(template), 'special': special, 'ends': ends, 'files': files}


def as_object(text, name):
    """A JSON text -> a dict. ValueError, with the name of its file, if it is none"""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f'{name}: {e}') from None


def named(about):
    """The special tokens that a tokenizer_config.json names: {'bos_token': '<s>', ...}"""
    words = {}
    for name, word in about.items():
        if isinstance(word, dict):                              # with flags
            word = word.get('content')
        if name.endswith('_token') and isinstance(word, str):
            words[name] = word
    return words


def marked(text, data):
    """The text with MARK in all that would be read as a special token."""
    for word in data.get('special', {}):
        text = text.replace(word, word[0] + MARK + word[1:])
    return text


def rendered(messages, data):
    """The text that the chat template makes of messages, a list of {'role', 'content'}, up to where the next
    answer begins. ValueError if there is no template, or it is broken, refuses them, or takes too long."""
    if not data.get('template'):
        raise ValueError('--chat: this model brings no chat template; take one that was trained to chat, '
                         f'whose folder has {TEMPLATE}, or leave --chat out')
    names = named(as_object(data.get('files', {}).get(TOKENS, '{}'), TOKENS))
    messages = [{**message, 'content': marked(message['content'], data)} for message in messages]
    given = {'template': data['template'], 'messages': messages, 'names': names}
    try:
        done = subprocess.run([sys.executable, os.path.abspath(__file__)], input=json.dumps(given).encode(),
                              capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f'the chat template takes more than {SECONDS} seconds') from None
    if done.returncode:
        lines = done.stderr.decode('utf-8', 'replace').strip().splitlines() or ['it was stopped']
        raise ValueError(f'the chat template does not take these messages: {lines[-1][:200]}')
    return done.stdout.decode('utf-8', 'surrogatepass')


def tokens(text, data):
    """Token ids of a rendered text."""
    if MARK not in text:
        return prepare.encode(text, data, special=True)
    words = sorted(data['special'], key=len, reverse=True)
    ids = []
    for part in re.split(f'({"|".join(map(re.escape, words))})', text):
        if part in data['special']:
            ids.append(data['special'][part])
        else:
            ids += prepare.encode(part.replace(MARK, ''), data)
    return ids


def main():
    """Render what comes on standard input, as transformers would."""
    import jinja2.sandbox
    with contextlib.suppress(ImportError, ValueError, OSError):         # there is none on Windows
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def raise_exception(why):
        raise jinja2.TemplateError(why)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)
    given = json.load(sys.stdin)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=['jinja2.ext.loopcontrols'])
    env.filters['tojson'] = tojson
    env.globals['raise_exception'] = raise_exception
    env.globals['strftime_now'] = datetime.datetime.now().strftime
    try:
        template = env.from_string(given['template'])
        text = template.render(messages=given['messages'], add_generation_prompt=True, tools=None,
                               documents=None, **given['names'])
    except Exception as e:      # noqa: BLE001  a template may raise anything
        sys.exit(f'{type(e).__name__}: {e}')
    if len(text) > SIZE:
        sys.exit(f'its text has {len(text):,} characters, expected at most {SIZE:,}')
    sys.stdout.buffer.write(text.encode('utf-8', 'surrogatepass'))


if __name__ == '__main__':
    main()
