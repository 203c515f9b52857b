"""All files of weights: our own, and those of GPT-2, Llama, BERT and ViT in the hub's layout.

    write_tensors('out/x.safetensors', tensors, meta)   # ours: a checkpoint, a state, a stage of a conversion
    tensors, meta = read_tensors('out/x.safetensors')

    folder = Folder(hub('gpt2', 'main'), 'gpt2')        # downloaded once, then kept in data/hub
    model = GPT(Config(**folder.config))
    folder.tensors(model.state_dict())                  # -> tensors in our names and these shapes
    to_folder('out/export', tensors, config, data)      # and back

All weights are safetensors: a JSON header, then raw numbers. Nothing is pickled, so a file cannot run code.
Files are written completely or not at all (`prepare.atomic`). This file builds no nn.Module: model.py does
that, from a config, a dict of the fields of model.Config.

What a folder has and we do not use is said in a line that begins with note:, or refused.

BERT and ViT are encoders. We read their classifier head, if the folder has one (ForSequenceClassification or
ForImageClassification), but not BERT's heads for masked words and next sentences. Our BERT reads one text.
BERT adds one vector to all positions of a first text and another to those of a second. We add the first
vector to the position embeddings and drop the second. preprocessor_config.json of a ViT must scale pixels as
published. We cannot write ViT.
"""
import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import tempfile
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data import chat, prepare
from data.flags import plural

# ---- files of our own --------------------------------------------------------------------------------------
# Their header has two strings of ours: meta, as JSON, and digest, a sha256 over meta and all tensors.
def write_safetensors(path, tensors, notes):
    """Write a safetensors file, which replaces the old one in one step. notes: strings for its header"""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    folder, name = os.path.split(os.path.abspath(path))
    # safetensors first writes a hidden file beside the one it is given. In a folder of its own, whose name
    # says what it is, that can be found if this process is killed meanwhile (train.log_of does).
    with prepare.atomic(path) as temp, tempfile.TemporaryDirectory('.part', f'{name}.', folder) as own:
        try:
            save_file(tensors, f'{own}/new', notes)
            os.replace(f'{own}/new', temp)
        except SafetensorError as e:
            raise OSError(f'{path}: cannot be written ({e})') from None


def digest(meta, tensors):
    """sha256 over the metadata (a string) and each tensor's name, type, shape and bytes."""
    total = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        total.update(f'{name} {x.dtype} {tuple(x.shape)}'.encode())
        if x.numel():
            total.update(x.flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def weights_digest(model, meta):
    """The digest of a loaded model: from its file or, for a folder, computed from its weights."""
    return meta.get('digest') or digest('', model.state_dict())


def is_state(path):
    """Whether a file is a state of sample.py. Reads only its header."""
    try:
        with safe_open(path, 'pt') as f:
            return 'made_with' in json.loads(f.metadata()['meta'])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
        return False


def refuse_target(path, state=False):
    """ValueError if a state would replace something else, or something else a state; or what is not regular.
    """
    prepare.refuse_irregular(path)
    if os.path.exists(path) and is_state(path) != state:
        raise ValueError(f'{path}: a state is never written over something else, nor something else over a '
                         'state; take it away, or give another name')


def write_tensors(path, tensors, meta):
    """Write tensors and a JSON-able dict into a file, with a digest of both. OSError if it cannot be written,
    ValueError as for `refuse_target`."""
    refuse_target(path, 'made_with' in meta)
    text = json.dumps(meta)
    write_safetensors(path, tensors, {'meta': text, 'digest': digest(text, tensors)})


def mapped_tensors(path, name):
    """-> the tensors of a safetensors file, mapped: what is not used takes no memory; and the strings of its
    header. ValueError if it is broken or not one. name: of the file, for messages"""
    if not os.path.isfile(path):                            # a pipe would be waited for
        raise ValueError(f'{name}: missing, or no regular file')
    try:
        with safe_open(path, 'pt') as f:
            in_file = f.keys()
            return {key: f.get_tensor(key) for key in in_file}, f.metadata() or {}
    except (SafetensorError, OSError, RuntimeError) as e:
        raise ValueError(f'{name}: not a whole safetensors file ({e})') from None


def read_tensors(path):
    """-> tensors, meta (with digest). ValueError if the file is missing, foreign, truncated or changed."""
    if not os.path.exists(path):
        raise ValueError(f'{path}: no such file; train.py and convert.py write ckpt.safetensors, sample.py '
                         '--save_state writes a state')
    tensors, header = mapped_tensors(path, path)
    if not {'meta', 'digest'} <= header.keys():
        raise ValueError(f'{path}: a safetensors file, but not written by this project; give the folder of a '
                         'model of the hub')
    if digest(header['meta'], tensors) != header['digest']:
        raise ValueError(f'{path}: its contents do not match its digest: the file was damaged or changed')
    try:
        return tensors, {**json.loads(header['meta']), 'digest': header['digest']}
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f'{path}: its header says nothing that this project writes ({e})') from None


# ---- GPT-2, Llama, BERT, ViT: a table for each, used in both directions ------------------------------------

class Family(NamedTuple):
    """How the hub stores one kind of model. In names, {i} is the number of a layer, {next} that of the next
    layer, {p} is weight or bias. (a|b) are several tensors of theirs, whose rows we stack in one. A final .T
    means that theirs is transposed. Tensors that a model lacks, such as biases or a head, are skipped."""
    names: dict     # ours -> theirs
    entries: dict   # field of Config -> entry of config.json
    usual: dict     # field whose entry may be missing -> its default
    config: dict    # fields of Config that all models of this kind share
    known: dict     # entry of config.json -> values we accept; the first is the default, and is written


DECODER = {'conv': 0, 'causal': True, 'encoder': 0, 'classes': 0, 'patch': 0, 'post_norm': False}
ENCODER = {'conv': 0, 'causal': False, 'pool': 'first', 'pos': 'learned', 'act': 'gelu-erf', 'bias': True,
           'rms': False, 'n_kv_head': 0, 'tied': True}
SIZES = {'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size',
         'n_inner': 'intermediate_size'}
OF_TEXTS = {**SIZES, 'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings'}
NO = (False, None)
QUANTISED = 'quantised weights are not read; take those in float32, float16 or bfloat16'
FAMILIES = {
    'gpt2': Family(
        names={'embed.weight': 'transformer.wte.weight',
               'positions.weight': 'transformer.wpe.weight',
               'blocks.{i}.norm1.{p}': 'transformer.h.{i}.ln_1.{p}',
               'blocks.{i}.mixer.qkv.{p}': 'transformer.h.{i}.attn.c_attn.{p}.T',
               'blocks.{i}.mixer.proj.{p}': 'transformer.h.{i}.attn.c_proj.{p}.T',
               'blocks.{i}.norm2.{p}': 'transformer.h.{i}.ln_2.{p}',
               'blocks.{i}.up.{p}': 'transformer.h.{i}.mlp.c_fc.{p}.T',
               'blocks.{i}.down.{p}': 'transformer.h.{i}.mlp.c_proj.{p}.T',
               'norm.{p}': 'transformer.ln_f.{p}',
               'head.weight': 'lm_head.weight'},
        entries={'n_layer': 'n_layer', 'n_head': 'n_head', 'n_embd': 'n_embd', 'n_inner': 'n_inner',
                 'vocab_size': 'vocab_size', 'block_size': 'n_positions', 'eps': 'layer_norm_epsilon',
                 'tied': 'tie_word_embeddings'},
        usual={'n_inner': 0, 'block_size': 1024, 'eps': 1e-5, 'tied': True},
        config={**DECODER, 'pos': 'learned', 'act': 'gelu', 'bias': True, 'rms': False, 'n_kv_head': 0},
        known={'activation_function': ('gelu_new', 'gelu_pytorch_tanh'), 'scale_attn_weights': (True,),
               'scale_attn_by_inverse_layer_idx': NO}),
    'llama': Family(
        names={'embed.weight': 'model.embed_tokens.weight',
               'blocks.{i}.norm1.weight': 'model.layers.{i}.input_layernorm.weight',
               'blocks.{i}.mixer.qkv.weight': 'model.layers.{i}.self_attn.(q|k|v)_proj.weight',
               'blocks.{i}.mixer.proj.weight': 'model.layers.{i}.self_attn.o_proj.weight',
               'blocks.{i}.norm2.weight': 'model.layers.{i}.post_attention_layernorm.weight',
               'blocks.{i}.up.weight': 'model.layers.{i}.mlp.(gate|up)_proj.weight',
               'blocks.{i}.down.weight': 'model.layers.{i}.mlp.down_proj.weight',
               'norm.weight': 'model.norm.weight',
               'head.weight': 'lm_head.weight'},
        entries={**OF_TEXTS, 'n_kv_head': 'num_key_value_heads', 'eps': 'rms_norm_eps', 'theta': 'rope_theta',
                 'tied': 'tie_word_embeddings'},
        usual={'block_size': 2048, 'n_kv_head': 0, 'eps': 1e-6, 'theta': 1e4, 'tied': False},
        config={**DECODER, 'pos': 'rope', 'act': 'swiglu', 'bias': False, 'rms': True},
        known={'hidden_act': ('silu',), 'attention_bias': NO, 'mlp_bias': NO}),
    'bert': Family(     # our layer begins with the norm that ends their previous layer
        names={'embed.weight': 'bert.embeddings.word_embeddings.weight',
               'positions.weight': 'bert.embeddings.position_embeddings.weight',
               'blocks.0.norm1.{p}': 'bert.embeddings.LayerNorm.{p}',
               'blocks.{next}.norm1.{p}': 'bert.encoder.layer.{i}.output.LayerNorm.{p}',
               'blocks.{i}.mixer.qkv.{p}': 'bert.encoder.layer.{i}.attention.self.(query|key|value).{p}',
               'blocks.{i}.mixer.proj.{p}': 'bert.encoder.layer.{i}.attention.output.dense.{p}',
               'blocks.{i}.norm2.{p}': 'bert.encoder.layer.{i}.attention.output.LayerNorm.{p}',
               'blocks.{i}.up.{p}': 'bert.encoder.layer.{i}.intermediate.dense.{p}',
               'blocks.{i}.down.{p}': 'bert.encoder.layer.{i}.output.dense.{p}',
               'pooler.{p}': 'bert.pooler.dense.{p}',
               'head.{p}': 'classifier.{p}'},
        entries={**OF_TEXTS, 'pad': 'pad_token_id', 'eps': 'layer_norm_eps'},
        usual={'block_size': 512, 'pad': 0, 'eps': 1e-12},
        config={**ENCODER, 'post_norm': True, 'pooler': True, 'patch': 0, 'cls': False},
        known={'hidden_act': ('gelu',), 'position_embedding_type': ('absolute',), 'is_decoder': NO,
               'add_cross_attention': NO, 'problem_type': (None, 'single_label_classification')}),
    'vit': Family(
        names={'embed.{p}': 'vit.embeddings.patch_embeddings.projection.{p}',
               'cls.weight': 'vit.embeddings.cls_token',
               'positions.weight': 'vit.embeddings.position_embeddings',
               'blocks.{i}.norm1.{p}': 'vit.encoder.layer.{i}.layernorm_before.{p}',
               'blocks.{i}.mixer.qkv.{p}': 'vit.encoder.layer.{i}.attention.attention.(query|key|value).{p}',
               'blocks.{i}.mixer.proj.{p}': 'vit.encoder.layer.{i}.attention.output.dense.{p}',
               'blocks.{i}.norm2.{p}': 'vit.encoder.layer.{i}.layernorm_after.{p}',
               'blocks.{i}.up.{p}': 'vit.encoder.layer.{i}.intermediate.dense.{p}',
               'blocks.{i}.down.{p}': 'vit.encoder.layer.{i}.output.dense.{p}',
               'norm.{p}': 'vit.layernorm.{p}',
               'head.{p}': 'classifier.{p}'},
        entries={**SIZES, 'block_size': 'image_size', 'patch': 'patch_size', 'eps': 'layer_norm_eps'},
        usual={'eps': 1e-12},
        config={**ENCODER, 'post_norm': False, 'pooler': False, 'cls': True, 'vocab_size': 256},
        known={'hidden_act': ('gelu',), 'qkv_bias': (True,), 'num_channels': (3,),
               'problem_type': (None, 'single_label_classification')})}
WRITTEN = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'bert': 'BertModel'}
ALLOWED = {    # by the default of an entry: allowed types, bound below, in words
    type(None): ((int,), 0, 'a whole number of at least 1'),
    int: ((int,), -1, 'a whole number of at least 0'),
    float: ((int, float), 0, 'a number above 0'), bool: ((bool,), -1, 'true or false')}
TYPES = 'bert.embeddings.token_type_embeddings.weight'          # added to all positions of a text
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'   # for rope


def names(kind, config, ours):
    """{our name: theirs} of one model of a family. ours: the names of its tensors"""
    layers = config['n_layer']
    table = {}
    for name, theirs in FAMILIES[kind].names.items():
        for i in range(layers):
            for p in 'weight', 'bias':
                one = name.format(i=i, next=i + 1, p=p).replace(f'blocks.{layers}.norm1', 'norm')
                if one in ours:
                    table[one] = theirs.format(i=i, p=p)
    return table


def parts(theirs, x, width):
    """Split our tensor x into theirs -> {their name: a view of x}. width: of the model, and so the rows of
    its queries; keys and values may have fewer."""
    if theirs.endswith('.T'):
        return {theirs.removesuffix('.T'): x.t()}           # t() leaves a bias as it is
    front, _, rest = theirs.partition('(')
    middle, _, end = rest.partition(')')
    their_names = [front + part + end for part in middle.split('|')]
    n = len(x)
    cuts = {1: [], 2: [n // 2], 3: [width, (n + width) // 2]}[len(their_names)]
    return dict(zip(their_names, x.tensor_split(cuts)))


def parsed(path, name, use):
    """Read a JSON file -> use(its content). ValueError if it is broken, or has content that `use` cannot
    read. name: of the file, for messages"""
    content = prepare.read_file(path)
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


def kind_and_config(raw):
    """The content of a config.json -> kind of model, dict of fields of Config. ValueError for a model that we
    cannot compute exactly, and if an entry is missing or contradicts another."""
    kind = raw.pop('model_type', None)
    if kind not in FAMILIES:
        raise ValueError(f'model_type {kind}; known are GPT-2, Llama, BERT and ViT')
    family = FAMILIES[kind]
    for key, values in family.known.items():
        if raw.get(key, values[0]) not in values:
            raise ValueError(f'{key} {raw[key]}, expected {" or ".join(map(str, values))}')
    if raw.get('quantization_config'):
        raise ValueError(f'quantization_config: {QUANTISED}')
    config = {'rule': 'softmax', 'classes': 0, 'ends': raw.get('eos_token_id'), 'labels': raw.get('id2label'),
              **family.config}
    named = raw.get('architectures') or []
    for name in [named] if isinstance(named, str) else named:
        if name.endswith(('ForTokenClassification', 'ForMultipleChoice')):
            raise ValueError(f'{name} has a class for something else than a whole text')
        if name.endswith('Classification'):
            if config['causal']:
                raise ValueError(f'{name}: a classifier is read from BERT and ViT; take the language model')
            config['classes'] = 1           # at least: the file says how many
    rope = {}
    for key in 'rope_scaling', 'rope_parameters':           # older files, newer files
        rope.update(raw.get(key) or {})
    config['rope_scaling'] = scaling_of(rope)
    raw = {**raw, **rope}                                   # newer files have rope_theta in there
    for field, key in family.entries.items():
        config[field] = entry(raw, key, family.usual.get(field))
    if 'patch' in family.entries:                   # a picture model: ours counts numbers, 3 per pixel
        side = config['block_size']
        if side % config['patch']:
            raise ValueError(f'patch_size {config["patch"]} does not divide image_size {side}')
        config['block_size'] = 3 * side ** 2
        config['patch'] = 3 * config['patch'] ** 2
    heads = config['n_head']
    if raw.get('head_dim') not in (None, config['n_embd'] / heads):
        raise ValueError(f'head_dim is not the width {config["n_embd"]} / {heads} heads')
    return kind, config


def entry(raw, key, usual):
    """An entry of a config.json. usual: the default for a missing entry; None: it must be there"""
    types, above, expected = ALLOWED[type(usual)]
    value = raw.get(key)
    if value is None:
        value = usual
    if type(value) not in types or not above < value < math.inf:
        raise ValueError(f'{key} is {raw.get(key)!r}, expected {expected}')
    if type(usual) is float:
        return float(value)                         # rope_theta is often the integer 10000
    return value


def scaling_of(rope):
    """The four numbers of Llama 3.1's rope (see model.speeds); [] for plain rope. ValueError for others."""
    way = rope.get('rope_type', rope.get('type'))
    if way == 'default' or (way is None and 'factor' not in rope):
        return []
    if way != 'llama3':
        raise ValueError(f'rope of type {way}, expected default or llama3')
    return [entry(rope, key, math.nan) for key in LLAMA3]           # nan is refused, so all must be there


# ---- folders in the hub's layout ---------------------------------------------------------------------------

class Folder:
    """A folder with config.json and *.safetensors. ValueError for files that are missing, broken or do not
    fit together. source: its name in messages.

    config: a dict of fields of Config. data: the description of the tokens, as in our checkpoints.
    """
    def __init__(self, path, source):
        file = os.path.join(path, 'config.json')
        self.kind, self.config = parsed(file, file, kind_and_config)
        self.source = source
        self.stored = {}                    # name by `uniform_name` -> its file, name there, tensor
        self.used = set()                   # of these names
        for file in files_of_weights(path):
            tensors, _ = mapped_tensors(file, file)
            for name, x in tensors.items():
                uniform = uniform_name(name)
                if uniform in self.stored:
                    other, _, _ = self.stored[uniform]
                    raise ValueError(f'{file}: {name} is also in {other}; keep that of the model alone')
                self.stored[uniform] = file, name, x
        self.data = {**data_of(path, self.kind, self.config), 'name': source}
        named = self.config.pop('labels')
        with as_the_hub(path):
            self.data.update(chat.of_folder(path, self.data, self.config.pop('ends')))
        theirs = FAMILIES[self.kind].names
        head = theirs.get('head.weight')
        if self.config['tied'] and head in self.stored:         # the file is right, not config.json
            embed, head = (self.tensor(theirs[ours], None, self.config['n_embd'])
                           for ours in ('embed.weight', 'head.weight'))
            self.config['tied'] = torch.equal(embed, head.to(embed.dtype))
        if self.kind in ('bert', 'vit'):
            self.config['pooler'] = self.config['pooler'] and 'pooler.dense.weight' in self.stored
            if self.config['classes'] or 'classifier.weight' in self.stored:
                self.config['classes'] = len(self.tensor('classifier.weight', None, self.config['n_embd']))
            if self.config['classes'] == 1:
                raise ValueError(f'{source}: classifier.weight has one row: it says a number, not which of '
                                 'at least 2 classes')
            classes = self.config['classes']
            with as_the_hub(path):
                labels = labels_of(named or {}, classes)
            self.data['labels'] = [] if labels == labels_of({}, classes) else labels

    def tensors(self, like):
        """All tensors in our names, in fp32. like: the state_dict of a softmax model"""
        ours = {}
        for name, theirs in names(self.kind, self.config, like).items():
            ours[name] = torch.empty(like[name].shape)
            for part, view in parts(theirs, ours[name], self.config['n_embd']).items():
                view.copy_(self.tensor(part, *view.shape))
        if self.kind == 'bert':
            ours['positions.weight'] += self.tensor(TYPES, None, self.config['n_embd'])[:1]
        if self.kind == 'vit':                              # its pixels: x / 127.5 - 1; ours: x / 255
            ours['embed.bias'] -= ours['embed.weight'].sum(1)
            ours['embed.weight'] *= 2
        unused = [name for uniform, (_, name, _) in self.stored.items() if uniform not in self.used]
        if unused:
            kinds = collections.Counter(re.sub(r'\d+', 'N', name) for name in unused)
            names_of_kinds = ', '.join(f'{name} ({n})' for name, n in sorted(kinds.items()))
            prepare.note(f'{self.source}: {plural(len(unused), "tensor")} not used: {names_of_kinds}')
        return ours

    def tensor(self, name, rows, *columns):
        """One tensor of this shape. rows None: of any number of rows"""
        if uniform_name(name) not in self.stored:
            raise ValueError(f'{self.source}: tensor {name} is missing')
        self.used.add(uniform_name(name))
        _, stored, x = self.stored[uniform_name(name)]
        if not x.is_floating_point() or x.element_size() == 1:
            raise ValueError(f'{self.source}: {stored} is {x.dtype}: {QUANTISED}')
        if x.dim() == 3:                    # a ViT's positions have a batch axis of 1
            x = x.squeeze(0)
        if x.dim() == 4:                    # its convolution reads one patch at a time
            x = x.flatten(1)
        if rows is None:
            rows = max(1, len(torch.atleast_1d(x)))
        shape = rows, *columns
        if x.shape != shape:
            raise ValueError(f'{self.source}: {stored} has shape {tuple(x.shape)}, expected {shape}')
        if not x.isfinite().all():
            raise ValueError(f'{self.source}: {stored} is not finite: the weights are broken')
        return x


def labels_of(named, classes):
    """The names of the classes. named: the entry id2label of a config.json, which may leave some out"""
    return [str(named.get(str(i), f'LABEL_{i}')) for i in range(classes)]


def files_of_weights(folder):
    """The paths of the files that hold a folder's model: model.safetensors; else those that the index names;
    else the only one there is. Others are not read, which is said."""
    there = [file for file in sorted(os.listdir(folder)) if file.endswith('.safetensors')]
    index = os.path.join(folder, INDEX)
    files = there
    if WHOLE in there:
        files = [WHOLE]
    elif os.path.exists(index):
        files = parsed(index, index, shards)
    elif len(there) > 1:
        raise ValueError(f'{folder}: {", ".join(there)}: which is the model? Keep one, or call it {WHOLE}')
    if not files:
        raise ValueError(f'{folder}: no {WHOLE}; pickled weights (.bin, .pt) are not read')
    others = [file for file in there if file not in files]
    if others:
        prepare.note(f'{folder}: the model is {", ".join(files)}; not read: {", ".join(others)}')
    return [os.path.join(folder, file) for file in files]


def uniform_name(name):
    """The uniform name of a tensor. Some files leave out the first word; torch.compile and DataParallel put
    their own in front. Older ones, such as bert-base-uncased, call a LayerNorm's weight and bias gamma and
    beta."""
    name = re.sub(r'^((_orig_mod|module)\.)*((transformer|model|bert|vit)\.)?', '', name)
    name = re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name)
    return re.sub(r'LayerNorm\.beta$', 'LayerNorm.bias', name)


def data_of(folder, kind, config):
    """The description of a model's tokens. A ViT reads only pictures of its own size."""
    data = {'vocab_size': config['vocab_size']}
    if kind == 'vit':
        path = os.path.join(folder, PIXELS)
        if os.path.exists(path):
            parsed(path, path, refuse_pixels)
        return {**data, 'tokenizer': 'ids', 'row': config['block_size'], 'patch': config['patch']}
    if 'pad' in config:
        data['pad'] = config['pad']
    return {**data, **tokenizer_of(folder, config['vocab_size'])}


def refuse_pixels(raw):
    """ValueError if a ViT's preprocessor_config.json does not scale pixels to -1 .. 1."""
    half = [0.5] * 3
    for key, value in {'do_normalize': True, 'image_mean': half, 'image_std': half}.items():
        if raw.get(key, value) != value:
            raise ValueError(f'{key} is {raw[key]}, expected {value}: a ViT of other pixels is not read')


def tokenizer_of(folder, vocab):
    """The description of the tokens of a model with `vocab` tokens, from the folder's own files. If there are
    none, tokens are only numbers. ValueError for a tokenizer that does not work, or not with this model."""
    path, words, merges = (os.path.join(folder, name) for name in (TOKENIZER, *OLDER))
    if os.path.exists(path):
        text = prepare.as_utf8(prepare.read_file(path), path)
    elif os.path.exists(words) and os.path.exists(merges):
        pairs = prepare.as_utf8(prepare.read_file(merges), merges)
        path = f'{words} with {OLDER[1]}'
        text = parsed(words, path, lambda words: json.dumps(byte_level(words, pairs)))
    else:
        prepare.note(f'{path} is missing, and {" with ".join(OLDER)}, too: tokens are only numbers')
        return {'tokenizer': 'ids'}
    with as_the_hub(path):
        if is_gpt2(json.loads(text)) and vocab == 50257:
            return {'tokenizer': 'gpt2'}
    prepare.package()                                       # outside try: the file is not to blame
    try:
        ids = set(prepare.subwords(text).get_vocab().values())
        if len(ids) != vocab or max(ids) >= vocab:
            prepare.note(f'{path} has {plural(len(ids), "token")}, the model {vocab:,}: no text has those of '
                         'one of them alone')
        before, behind = prepare.ends({'json': text, 'vocab_size': vocab})
        highest = max(before + behind, default=0)
        if highest >= vocab:
            raise ValueError(f'it puts token {highest} around a text, the model has {vocab:,}')
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path}: {e}; replace it by the file of this model, or take it away: then tokens '
                         'are only numbers') from None
    return {'tokenizer': 'json', 'json': text}


def is_gpt2(raw):
    """Whether the content of a tokenizer.json is GPT-2's. Then tiktoken reads the same tokens, and needs no
    other package."""
    ids = dict(raw['model']['vocab'])
    tokens = sorted(ids, key=ids.get)[:50256]
    same = prepare.short_hash('\n'.join(tokens).encode()) == '3a1f1c01'
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


def to_folder(folder, tensors, config, data):
    """Write tensors in our names as model.safetensors and config.json in the hub's layout, and beside them
    what data has of the folder that the model came from: tokenizer, chat template, ends of text. ValueError
    for other models than GPT-2, Llama and BERT with softmax in every layer. New files are made aside. The old
    config.json is removed first and the new one moved in last, so that two models are never mixed."""
    kind = family_of(config)
    if kind is None:
        raise ValueError('the hub has room for GPT-2, Llama and BERT with its pooler alone: softmax in every '
                         'layer, no convolutions; sample.py and model.load read others')
    raw = published(kind, config)
    texts = dict(data.get('files', {}))
    if 'json' in data and OLDER[0] not in texts:
        texts[TOKENIZER] = data['json']
    if data.get('ends'):
        raw['eos_token_id'] = data['ends'] if len(data['ends']) > 1 else data['ends'][0]
    if config['classes']:
        labels = data.get('labels') or labels_of({}, config['classes'])
        raw['id2label'] = dict(enumerate(labels))
        raw['label2id'] = {name: i for i, name in enumerate(labels)}
    theirs = {}
    for name, as_theirs in names(kind, config, tensors).items():
        theirs.update(parts(as_theirs, tensors[name], config['n_embd']))
    if kind == 'bert':
        raw['type_vocab_size'] = 2
        theirs[TYPES] = torch.zeros(2, config['n_embd'])
    os.makedirs(folder, exist_ok=True)
    for name in WHOLE, 'config.json', *chat.FILES, *chat.KEPT:
        prepare.refuse_irregular(os.path.join(folder, name))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        write_safetensors(os.path.join(made, WHOLE), theirs, {'format': 'pt'})
        for name in chat.FILES + chat.KEPT:
            if name in texts:
                prepare.write_file(os.path.join(made, name), [texts[name].encode()])
        prepare.write_json(os.path.join(made, 'config.json'), raw)
        for name in 'config.json', *chat.FILES, *chat.KEPT:     # of the old model
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))
        for name in sorted(os.listdir(made), key='config.json'.__eq__):         # that one last
            os.replace(os.path.join(made, name), os.path.join(folder, name))


def published(kind, config):
    """The inverse of `kind_and_config`: a config -> the content of a config.json."""
    family = FAMILIES[kind]
    raw = {'model_type': kind, 'architectures': [WRITTEN[kind]]}
    raw.update({key: values[0] for key, values in family.known.items()})
    as_many = {'n_inner': 4 * config['n_embd'], 'n_kv_head': config['n_head'], 'pad': 0}    # if ours is 0
    for field, key in family.entries.items():
        raw[key] = config[field]
        if not config[field] and field in as_many:
            raw[key] = as_many[field]
    if config['rope_scaling']:
        *factors, known = config['rope_scaling']
        raw['rope_scaling'] = {'rope_type': 'llama3', **dict(zip(LLAMA3, [*factors, int(known)]))}
    if config['classes']:
        raw['architectures'] = ['BertForSequenceClassification']
    return raw


def family_of(config):
    """The family of a model of this config, if we can write it; else None."""
    rules = config['layers'] or config['rule']
    for kind in WRITTEN:
        same = [config[field] == value for field, value in FAMILIES[kind].config.items()]
        if all(same) and {rule.strip() for rule in rules.split(',')} == {'softmax'}:
            return kind


# ---- the hub -----------------------------------------------------------------------------------------------

HUB = {'gpt2': 'openai-community/gpt2', 'bert-base-uncased': 'google-bert/bert-base-uncased'}   # short names
WHOLE = 'model.safetensors'
INDEX = f'{WHOLE}.index.json'
TOKENIZER, *OLDER = chat.KEPT            # the older two stood together for the first
PIXELS = 'preprocessor_config.json'


def folder_of(source, revision):
    """The folder itself, or the one into which the hub's model was downloaded."""
    if os.path.isdir(source):
        if os.path.exists(os.path.join(source, 'config.json')):
            return source
        raise ValueError(f'{source}: no config.json in it, which the folder of a model of the hub has; if '
                         'train.py or convert.py made it, give the file ckpt.safetensors')
    if not re.fullmatch(r'[\w.-]+(/[\w.-]+)?', source):
        raise ValueError(f'{source}: no such file or folder, nor a name on the hub, as OWNER/NAME')
    return hub(source, revision)


def hub(name, revision='main'):
    """The folder of a model on the hub, OWNER/NAME or one of `HUB`; it is downloaded once. The variables of
    huggingface_hub hold: HF_HOME, HF_TOKEN, HF_ENDPOINT."""
    try:
        import huggingface_hub                              # it comes with tokenizers
    except ImportError:
        raise ValueError(f'{name}: no such file or folder, and to ask the hub needs a package that is not '
                         'here: pip install tokenizers') from None
    wanted = ['config.json', '*.safetensors', INDEX, PIXELS, *chat.FILES, *chat.KEPT]
    try:
        return huggingface_hub.snapshot_download(HUB.get(name, name), revision=revision, allow_patterns=wanted)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError) as e:
        raise ValueError(f'{name}: {" ".join(str(e).split())[:200]}') from None


def shards(raw):
    """The files that are named in an index of weights."""
    return sorted({os.path.basename(file) for file in raw['weight_map'].values()})
