"""sample.py --chat: a conversation with a model, in its own chat template.

    talk = Talk(system_prompt(args, data), data)
    for said in spoken(args.prompt):
        ids = talk.ask(said)                    # tokens to read, from talk.state on
        ...
        talk.answer(written)                    # tokens of the answer
"""
import sys

from common import files
from common.errors import aside
from data import chat, vocabulary

HELP = '/reset begins anew; /quit or Ctrl-D ends the chat; Ctrl-C ends an answer or, where you type, the chat'


def spoken(prompt):
    """What a user says: --prompt, then or without it each line of standard input, up to /quit."""
    for said in lines_of(prompt):
        if said == '/quit':
            return
        if said == '/help':
            aside(HELP)
        elif said:
            yield said


def lines_of(prompt):
    """The same, with commands and empty lines."""
    if prompt:
        yield files.text_of(prompt)
    while sys.stdin and (sys.stdin.isatty() or not prompt):
        if sys.stdin.isatty():
            print('> ', end='', file=sys.stderr, flush=True)
        try:
            line = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            line = b''
        if not line:
            if sys.stdin.isatty():
                aside('')                                   # what comes next begins a line
            return
        yield files.as_utf8(line, 'standard input').strip()


def system_prompt(args, data):
    """The messages with which a chat begins: none, or --system. ValueError if the template leaves it out."""
    if not args.system:
        return []
    system = [{'role': 'system', 'content': files.text_of(args.system)}]
    asked = [{'role': 'user', 'content': 'Hello'}]
    if chat.rendered(system + asked, data) == chat.rendered(asked, data):
        raise ValueError(f'--system: the chat template of {args.init} has no place for it; leave it out')
    return system


class Talk:
    """A conversation. heard: its tokens, each with whether the model wrote it; state: after the first of
    these; text: what all of them say. The state is handed from answer to answer."""
    def __init__(self, system, data):
        self.system = system
        self.data = data
        self.reset()

    def reset(self):
        self.messages = [*self.system]
        self.forget()

    def forget(self):
        """Read all anew, from the messages."""
        self.heard, self.state, self.text = [], None, ''

    @property
    def read(self):
        """How many tokens the state has."""
        return int(self.state['t']) if self.state else 0

    def ask(self, said):
        """What is said, in the template -> the tokens that are to be read. If a template changes what was
        said before, these are all tokens."""
        self.messages.append({'role': 'user', 'content': said})
        text = chat.rendered(self.messages, self.data)
        if not text.startswith(self.text):
            self.forget()
        new = vocabulary.encode(text[len(self.text):], self.data, special=True)
        vocabulary.tell_lost(new, self.data)
        self.text = text
        self.heard += [(token, False) for token in new]
        ids = [token for token, _ in self.heard[self.read:]]
        if not ids:
            raise ValueError('the chat template makes nothing of these messages')
        return ids

    def answer(self, tokens):
        """What the model answered."""
        self.heard += [(token, True) for token in tokens]
        written = vocabulary.decode(tokens, self.data)
        self.messages.append({'role': 'assistant', 'content': written})
        self.text += chat.tamed(written, self.data)
