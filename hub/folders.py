"""Folders of pretrained models in the hub's layout: downloaded, read, written.

    folder = Folder(folder_of('gpt2'), 'gpt2')  # downloaded once, then kept by huggingface_hub
    model = GPT(Config(**folder.config))                # or another class: models/files.py finds it
    folder.tensors(model.state_dict())                  # -> tensors in our names and these shapes
    to_folder('out/export', tensors, config, data)      # and back

This file builds no nn.Module: models/files.py does that, from a config, a dict of the fields of a Config.
Tensors that we do not use are counted in a line that begins with note:, entries that we cannot follow are
refused.
"""
import contextlib
import os
import re
import tempfile

import torch

from common import files
from common.errors import note
from common.flags import plural
from common.weights import mapped_tensors, one_tensor, write_safetensors
from data.kinds import Data
from data.special import TOKENIZER, WORDS, as_object, as_the_hub
from hub.families import FAMILIES, TYPES, family_of, kind_and_config, names, parts, published, width_of_head
from hub.texts import TEXT_FILES, add_texts, parsed, tokenizer_of

CONFIG = 'config.json'
# What an export does not take over of config.json: the type of the numbers, and what `published` writes under
# another name
OF_WEIGHTS = ('dtype', 'torch_dtype', 'rope_parameters', 'rope_scaling', 'id2label', 'label2id', 'num_labels',
              'text_config', 'vision_config')

# ---- folders in the hub's layout ---------------------------------------------------------------------------

class Folder:
    """A folder with config.json and model.safetensors, or what its index names. ValueError for files that
    are missing, broken or do not fit together. source: its name in messages.

    config: a dict of fields of Config. data: the description of the tokens, as in our checkpoints.
    """
    def __init__(self, path, source):
        file = os.path.join(path, CONFIG)
        self.source = source
        self.kind, self.config = parsed(file, kind_and_config)
        self.stored = stored_in(path)
        self.used = set()                   # of its names
        ends = self.config.pop('ends')
        named = self.config.pop('labels') or {}
        self.config.update(self.by_the_tensors())
        self.data = data_of(path, self.kind, self.config)
        self.data.name = source
        with as_the_hub(path):
            add_texts(path, self.data, ends)
            self.data.files[CONFIG] = files.read_file(file).decode()
            labels = labels_of(named, self.config['classes'])
            if labels != labels_of({}, self.config['classes']):
                self.data.labels = labels

    def by_the_tensors(self):
        """The fields of Config that the tensors decide: they are right, not config.json."""
        width = self.config['n_embd']
        theirs = FAMILIES[self.kind].names
        found = {}
        if self.config['tied'] and theirs.get('head.weight') in self.stored:
            embed = self.tensor(theirs['embed.weight'], None, width)
            head = self.tensor(theirs['head.weight'], None, width)
            found['tied'] = torch.equal(embed, head.to(embed.dtype))
        if self.kind not in ('bert', 'vit'):
            return found
        found['pooler'] = self.config['pooler'] and 'pooler.dense.weight' in self.stored
        if self.config['classes'] or 'classifier.weight' in self.stored:
            found['classes'] = len(self.tensor('classifier.weight', None, width))
            if found['classes'] == 1:
                raise ValueError(f'{self.source}: classifier.weight has one row: it says a number, not which '
                                 'of at least 2 classes')
        return found

    def tensors(self, like, dtype=torch.float32):
        """All tensors in our names, of this type. like: the state_dict of a softmax model"""
        if self.kind in ('bert', 'vit'):
            dtype = torch.float32                           # their tensors are added up below
        table = names(self.kind, self.config, like)
        ours = {}
        for name, theirs in table.items():
            ours[name] = torch.empty(like[name].shape, dtype=dtype)
            for part, view in parts(theirs, ours[name], self.config).items():
                x = self.tensor(part, *view.shape)
                if theirs.endswith('+1'):
                    x = x.float() + 1                       # rounded once, if at all
                view.copy_(x)
        if self.kind == 'bert':
            ours['positions.weight'] += self.tensor(TYPES, None, self.config['n_embd'])[:1]
        if self.kind == 'vit':                              # its pixels: x / 127.5 - 1; ours: x / 255
            ours['embed.bias'] -= ours['embed.weight'].sum(1)
            ours['embed.weight'] *= 2
        unused = [name for uniform, (_, name) in self.stored.items() if uniform not in self.used]
        if unused:
            note(f'{self.source}: {plural(len(unused), "tensor")} not used, such as {min(unused)}')
        return ours

    def place(self, name):
        """Where the tensor of this name is -> a file, its name there"""
        uniform = uniform_name(whole_name(name))
        if uniform not in self.stored:
            there = sorted({os.path.basename(file) for file, _ in self.stored.values()})
            raise ValueError(f'{self.source}: tensor {whole_name(name)} is missing in {", ".join(there)}')
        self.used.add(uniform)
        return self.stored[uniform]

    def tensor(self, name, rows, *columns):
        """One tensor of this shape, or half of one, see `whole_name`. rows None: of any number of rows"""
        file, stored = self.place(name)
        x = one_tensor(file, stored)
        if not x.is_floating_point() or x.element_size() == 1:
            raise ValueError(f'{self.source}: {stored} is {x.dtype}: quantised weights are not read; take '
                             'those in float32, float16 or bfloat16')
        if x.dim() == 3 and len(columns) < 2:       # a ViT's positions have a batch axis of 1
            x = x.squeeze(0)
        if x.dim() == 4:                    # its convolution reads one patch at a time
            x = x.flatten(1)
        if rows is None:
            rows = max(1, len(torch.atleast_1d(x)))
        half = name != whole_name(name)
        shape = rows * (1 + half), *columns
        if x.shape != shape:
            raise ValueError(f'{self.source}: {stored} has shape {tuple(x.shape)}, expected {shape}')
        if not x.isfinite().all():
            raise ValueError(f'{self.source}: {stored} is not finite: the weights are broken')
        if half:
            return half_of(x, name, self.config).flatten(0, 1)
        return x


def stored_in(folder):
    """The tensors in a folder's files -> {name by `uniform_name`: its file, its name there}"""
    stored = {}
    for file in files_of_weights(folder):
        tensors, _ = mapped_tensors(file)
        for name in tensors:
            stored[uniform_name(name)] = file, name
    return stored


def whole_name(part):
    """The name of a tensor. part: maybe with .even or .odd at its end, which stands for half of its heads"""
    return part.removesuffix('.even').removesuffix('.odd')


def half_of(x, part, config):
    """A view of the heads of x that the name of a part stands for, (heads, channels, columns)"""
    return x.unflatten(0, (-1, 2, width_of_head(config)))[:, int(part.endswith('.odd'))]


def labels_of(named, classes):
    """The names of the classes. named: the entry id2label of a config.json, which may leave some out"""
    return [str(named.get(str(i), f'LABEL_{i}')) for i in range(classes)]


def files_of_weights(folder):
    """The paths of the files that hold a folder's model: model.safetensors; without it those that the index
    names."""
    chosen = [WHOLE]
    index = os.path.join(folder, INDEX)
    if os.path.exists(index) and not os.path.exists(os.path.join(folder, WHOLE)):
        chosen = parsed(index, shards)
    return [os.path.join(folder, file) for file in chosen]


def uniform_name(name):
    """The uniform name of a tensor. Some files leave out the first word. Older ones, as bert-base-uncased,
    call a LayerNorm's weight gamma, its bias beta. Some of Olmo Hybrid have the old names of its norms."""
    name = re.sub(r'^((transformer|model|bert|vit)\.)?(language_model\.)?', '', name)
    name = re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name)
    name = name.replace('.attention_layer_norm.', '.input_layernorm.')
    name = name.replace('.feedforward_layer_norm.', '.post_attention_layernorm.')
    return re.sub(r'LayerNorm\.beta$', 'LayerNorm.bias', name)


def data_of(folder, kind, config):
    """The description of a model's tokens. A ViT reads only pictures of its own size."""
    vocab = config['vocab_size']
    if kind == 'vit':
        path = os.path.join(folder, PIXELS)
        if os.path.exists(path):
            parsed(path, refuse_pixels)
        return Data('ids', vocab, row=config['block_size'], patch=config['patch'])
    data = tokenizer_of(folder, vocab)
    data.pad = config.get('pad')
    if not config['causal']:
        data.bos = None                                         # it reads whole texts, and no row of one
    return data


def refuse_pixels(raw):
    """ValueError if a ViT's preprocessor_config.json does not scale pixels to -1 .. 1."""
    half = [0.5] * 3
    for key, value in {'do_normalize': True, 'image_mean': half, 'image_std': half}.items():
        if raw.get(key, value) != value:
            raise ValueError(f'{key} is {raw[key]}, expected {value}: a ViT of other pixels is not read')


def to_folder(folder, tensors, config, data):
    """Write tensors in our names as model.safetensors and config.json in the hub's layout, and beside them
    what data has of the folder that the model came from: its texts, its other entries of config.json.
    config: a dict with the fields of all kinds, see models.files.whole_config.
    ValueError for models of no family that we can write. New files are made aside. The old config.json is
    removed first and the new one moved in last, so that two models are never mixed."""
    texts = dict(data.files or {})
    given = as_object(texts, CONFIG)
    kind = family_of(config, given.get('model_type'))
    if kind is None:
        raise ValueError('the hub has room for GPT-2, Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Olmo Hybrid, '
                         'BERT with its pooler alone: no convolutions before a layer, softmax in every layer '
                         'but those of Qwen3.5 and Olmo; sample.py and model.load read others')
    if data.json and not {TOKENIZER, WORDS} & texts.keys():
        texts[TOKENIZER] = data.json
    raw = {key: x for key, x in given.items() if key not in OF_WEIGHTS}
    raw.update(published(kind, config))
    if data.ends:
        raw.setdefault('eos_token_id', data.ends if len(data.ends) > 1 else data.ends[0])
    if config['classes']:
        labels = data.labels or labels_of({}, config['classes'])
        raw['id2label'] = dict(enumerate(labels))
        raw['label2id'] = {name: i for i, name in enumerate(labels)}
    theirs = {}
    for name, as_theirs in names(kind, config, tensors).items():
        x = tensors[name]
        if as_theirs.endswith('+1'):
            x = x - 1
        for part, view in parts(as_theirs, x, config).items():
            if part == whole_name(part):
                theirs[part] = view
                continue
            both = theirs.setdefault(whole_name(part), x.new_empty(2 * len(view), x.shape[1]))
            half_of(both, part, config).copy_(view.unflatten(0, (-1, width_of_head(config))))
    if kind == 'bert':
        raw['type_vocab_size'] = 2
        theirs[TYPES] = torch.zeros(2, config['n_embd'])
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        write_safetensors(os.path.join(made, WHOLE), theirs, {'format': 'pt'})
        for name in TEXT_FILES:
            if name in texts:
                files.write_file(os.path.join(made, name), [texts[name].encode()])
        files.write_json(os.path.join(made, CONFIG), raw)
        for name in CONFIG, *TEXT_FILES:                        # of the old model
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))
        for name in sorted(os.listdir(made), key=CONFIG.__eq__):         # that one last
            os.replace(os.path.join(made, name), os.path.join(folder, name))


# ---- the hub -----------------------------------------------------------------------------------------------

GPT2S = 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'
SHORT_NAMES = {**{name: f'openai-community/{name}' for name in GPT2S},
               'bert-base-uncased': 'google-bert/bert-base-uncased'}
WHOLE = 'model.safetensors'
INDEX = f'{WHOLE}.index.json'
PIXELS = 'preprocessor_config.json'


def folder_of(source):
    """The folder itself, or that of a model on the hub, OWNER/NAME or one of `SHORT_NAMES`; it is downloaded
    once. The variables of huggingface_hub hold: HF_HOME, HF_TOKEN, HF_ENDPOINT."""
    if os.path.isdir(source):
        if not os.path.exists(os.path.join(source, CONFIG)):
            raise ValueError(f'{source}: no {CONFIG} in it; of a run of ours give the file ckpt.safetensors')
        return source
    if not re.fullmatch(r'\w[\w.-]*(/[\w.-]+)?', source):
        raise ValueError(f'{source}: no such file or folder, nor a name on the hub, as OWNER/NAME')
    import huggingface_hub                                  # it comes with tokenizers
    wanted = [CONFIG, '*.safetensors', INDEX, PIXELS, *TEXT_FILES]
    try:
        return huggingface_hub.snapshot_download(SHORT_NAMES.get(source, source), allow_patterns=wanted)
    except (OSError, ValueError) as e:
        raise ValueError(f'{source}: no such folder; the hub: {" ".join(str(e).split())[:200]}') from None


def shards(raw):
    """The files that are named in an index of weights."""
    return sorted({os.path.basename(file) for file in raw['weight_map'].values()})
