"""What a data set consists of: one description, in meta.json and in the files of models.

    data = Data(tokenizer='ids', vocab_size=40, row=128, ignore=40)
    data.kind                           # 'task'
    data.as_dict()                      # as meta.json has it: the tokenizer, and what is not the default

A set is of one kind. A text is a flat array of tokens, each the target of those before it. All others are
rows: a task (targets anywhere), labels (a class for each row), pairs (a text and its translation), pictures
(patches of numbers, and a class).
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

TRAVELS = 'template', 'special', 'ends', 'files', 'labels', 'bos', 'most'      # a model keeps them, too
TABLES = 'chars', 'json'
OF_TOKENS = 'tokenizer', 'vocab_size', *TABLES, 'marks', 'row', 'source', 'patch'


@dataclass
class Data:
    """The tokens and rows of a set, or of what a model was trained on (tokenizers: data/vocabulary.py). A row
    has inputs and targets; a target equal to `ignore` does not count."""
    tokenizer: str = 'byte'
    vocab_size: int = 0             # 0: not known yet
    name: str = ''
    chars: list = ()                # of char and words: the text of each token
    json: str = ''                  # of bpe:N and json: the content of a tokenizer.json
    marks: bool = False             # "<s>" in a text is the special token, not three characters
    bos: int = None                 # this token begins each row of a text
    most: int = 0                   # tokens of a row that a model takes; 0: any number
    dtype: str = ''                 # of the numbers in the .bin files
    row: int = 0                    # tokens in a row; 0: a text, which has no rows of its own
    ignore: int = -1
    pad: int = None                 # the padding token, at the end of inputs that are shorter than `row`
    classes: int = 0                # of a row; the target at the last real position is 0..classes-1
    source: int = 0                 # an encoder reads the first so many tokens; the others are the decoder's
    patch: int = 0                  # p: tokens are numbers 0..255, and p of them are one input, x / 255
    train: dict = None              # of a side: tokens, sha256 of its .bin and, of a text, bytes in UTF-8
    val: dict = None
    test: dict = None               # some sets have one
    # what comes with a pretrained model, see data/chat.py and hub/texts.py
    template: str = ''              # its chat template
    special: dict = field(default_factory=dict)     # special tokens: their ids
    ends: list = field(default_factory=list)        # ids that end a text
    files: dict = None              # of its folder, by name; None: it is none of the hub
    labels: list = field(default_factory=list)      # names of its classes

    def as_dict(self):
        """What is not the default, and the tokenizer, for JSON."""
        absent = vars(Data(''))
        return {name: value for name, value in vars(self).items() if value != absent[name]}

    @property
    def kind(self):
        """text, task, labels, pairs or picture"""
        if not self.row:
            return 'text'
        if self.patch:
            return 'picture'
        if self.classes:
            return 'labels'
        if self.pad is None:
            return 'task'
        return 'pairs'

    @property
    def is_joined(self):
        """Whether these are texts with targets here and there: joined pairs, chats. Their padding is a token
        like others."""
        return self.pad is not None and not (self.classes or self.source)

    @property
    def from_hub(self):
        """Whether it came with a model of the hub."""
        return self.files is not None

    @property
    def step(self):
        """How many numbers of a .bin file a row takes: inputs, then targets. A text has no rows: 1"""
        if self.row:
            return 2 * self.row
        return 1

    def of_tokens(self):
        """{field: value} of what is known of tokens and the length of rows."""
        return {name: value for name, value in self.as_dict().items() if name in OF_TOKENS}

    def has_tokens_of(self, like):
        """Whether tokens and rows are what `like` says of them. It need not say all."""
        return all(getattr(self, name) == value for name, value in like.of_tokens().items())

    def summary(self):
        """For messages: tokens and rows."""
        return ', '.join(f'{name} {value}' for name, value in self.of_tokens().items() if name not in TABLES)

    def bits_a_nat(self, side='val'):
        """The factor from nats per token to bits per byte of a side of a text."""
        about = getattr(self, side)
        return about['tokens'] / about['bytes'] / math.log(2)


class Set(NamedTuple):
    """How a set is made: an entry of sets.DATASETS or, for your own files, sets.OWN_FILES."""
    help: str
    way: str                        # an entry of ways.WAYS
    make: Callable                  # see data/tasks.py and data/sources.py
    tokenizer: str = 'byte'         # if none is asked for
    files: dict = {}                # by name: sha256, or None if unknown; in make's order     # noqa: RUF012
    urls: tuple = ()                # folders to try, in this order
    length: int = 0                 # of generated rows; of sentences and of a pair's parts, at most
    rows: tuple = ()                # generated: how many train, how many validate
    vocab: int = 0                  # above all tokens and targets
    meta: dict = {}                 # entries of Data                                           # noqa: RUF012
    side: int = 0                   # of a square picture, in pixels
    patch: int = 0                  # p x p pixels are one input
    # what a name adds: listops-2048, a file of your own
    base: str = ''                  # the set whose folder has the files
    own: str = ''                   # your own files, of this kind
