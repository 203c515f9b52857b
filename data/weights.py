"""Files of weights that others wrote: GPT-2, Llama, BERT and ViT as the hub keeps them. Tensors in, tensors
out.

    folder = hub('gpt2', 'main')                          # fetched once, then kept in data/hub
    tensors, config, data = from_folder(folder, 'gpt2')   # in our names, for GPT(Config(**config))
    to_folder('out/export', tensors, config, data)        # the way back

All files are safetensors: a header in JSON, then bare numbers. Nothing is pickled, so a file cannot run code.
Every file is written whole or not at all (`prepare.whole`). No nn.Module is built here: model.py does that,
from tensors and a config, which is a dict of the fields of model.Config; it also reads and writes our own
checkpoints, by `replace`.

BERT and ViT are encoders. They come with the classes that they were trained for, if the folder has any (named
ForSequenceClassification or ForImageClassification), and without BERT's other heads, which guess masked words
and next sentences. BERT reads one text: what it adds to each place of a first of two texts is added to its
positions here, what it adds to the second is left out. A ViT's pixels are scaled as preprocessor_config.json
says, which has to be as published; ViT is not written.
"""
import json
import os
import re
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data import prepare


def replace(path, tensors, notes):
    """A safetensors file in the place of what was there; notes: strings for its header."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with prepare.whole(path) as temp:
        try:
            save_file(tensors, temp, notes)
        except SafetensorError as e:
            raise OSError(f'{path}: cannot be written ({e})') from None


# ---- GPT-2, Llama, BERT, ViT: whose name is what, both ways ------------------------------------------------


class Family(NamedTuple):
    """How a kind of model is kept on the hub."""
    prefix: str         # of all names but the head's; some files do without
    layer: str          # of the names in a layer, * is its number
    names: dict         # our module -> theirs; if there are several, ours is their rows one below the other
    turned: bool        # matrices in layers are (in, out), not (out, in)
    sizes: dict         # field of Config -> entry of config.json, whole numbers
    optional: dict      # the same, where 0 or null is allowed: as many as the kind always has
    eps: tuple          # entry of config.json, its default
    tied: bool          # whether the head is the embedding where config.json does not say
    config: dict        # fields of Config that are the same in all of the kind
    says: dict          # entries of config.json that are
    known: dict         # entry of config.json -> what it may be here; the first is its default


OURS = 'nanofwp'        # model_type of a folder in names of ours, with a Config in its config.json
DECODER = {'conv': 0, 'causal': True, 'encoder': 0, 'classes': 0, 'patch': 0, 'post_norm': False}
ENCODER = {'conv': 0, 'causal': False, 'pool': 'first', 'pos': 'learned', 'act': 'gelu-erf', 'bias': True,
           'rms': False, 'n_kv_head': 0, 'tied': True}
NO = (False, None)
FAMILIES = {
    'gpt2': Family(
        prefix='transformer.', layer='h.*.', turned=True,
        names={'embed': 'wte', 'positions': 'wpe', 'norm': 'ln_f', 'head': 'lm_head', 'norm1': 'ln_1',
               'mixer.qkv': 'attn.c_attn', 'mixer.proj': 'attn.c_proj', 'norm2': 'ln_2', 'up': 'mlp.c_fc',
               'down': 'mlp.c_proj'},
        sizes={'n_layer': 'n_layer', 'n_head': 'n_head', 'n_embd': 'n_embd', 'vocab_size': 'vocab_size',
               'block_size': 'n_positions'},
        optional={'n_inner': 'n_inner'}, eps=('layer_norm_epsilon', 1e-5), tied=True,
        config={**DECODER, 'pos': 'learned', 'act': 'gelu', 'bias': True, 'rms': False, 'n_kv_head': 0},
        says={'architectures': ['GPT2LMHeadModel'], 'activation_function': 'gelu_new'},
        known={'activation_function': ('gelu_new', 'gelu_pytorch_tanh'), 'scale_attn_weights': (True,),
               'scale_attn_by_inverse_layer_idx': NO}),
    'llama': Family(
        prefix='model.', layer='layers.*.', turned=False,
        names={'embed': 'embed_tokens', 'norm': 'norm', 'head': 'lm_head', 'norm1': 'input_layernorm',
               'mixer.qkv': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
               'mixer.proj': 'self_attn.o_proj', 'norm2': 'post_attention_layernorm',
               'up': 'mlp.gate_proj mlp.up_proj', 'down': 'mlp.down_proj'},
        sizes={'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size',
               'n_inner': 'intermediate_size', 'vocab_size': 'vocab_size',
               'block_size': 'max_position_embeddings'},
        optional={'n_kv_head': 'num_key_value_heads'}, eps=('rms_norm_eps', 1e-6), tied=False,
        config={**DECODER, 'pos': 'rope', 'act': 'swiglu', 'bias': False, 'rms': True},
        says={'architectures': ['LlamaForCausalLM'], 'hidden_act': 'silu'},
        known={'hidden_act': ('silu',), 'attention_bias': NO, 'mlp_bias': NO}),
    'bert': Family(
        prefix='bert.', layer='encoder.layer.*.', turned=False,
        names={'embed': 'embeddings.word_embeddings', 'positions': 'embeddings.position_embeddings',
               'first norm': 'embeddings.LayerNorm', 'norm1': 'output.LayerNorm',    # of the layer before
               'mixer.qkv': 'attention.self.query attention.self.key attention.self.value',
               'mixer.proj': 'attention.output.dense', 'norm2': 'attention.output.LayerNorm',
               'up': 'intermediate.dense', 'down': 'output.dense', 'pooler': 'pooler.dense',
               'head': 'classifier'},
        sizes={'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size',
               'n_inner': 'intermediate_size', 'vocab_size': 'vocab_size',
               'block_size': 'max_position_embeddings'},
        optional={'pad': 'pad_token_id'}, eps=('layer_norm_eps', 1e-12), tied=True,
        config={**ENCODER, 'post_norm': True, 'pooler': True, 'patch': 0, 'cls': False},
        says={'hidden_act': 'gelu', 'type_vocab_size': 2},
        known={'hidden_act': ('gelu',), 'position_embedding_type': ('absolute',), 'is_decoder': NO,
               'add_cross_attention': NO, 'problem_type': (None, 'single_label_classification')}),
    'vit': Family(
        prefix='vit.', layer='encoder.layer.*.', turned=False,
        names={'embed': 'embeddings.patch_embeddings.projection', 'cls': 'embeddings.cls_token',
               'positions': 'embeddings.position_embeddings', 'norm': 'layernorm',
               'norm1': 'layernorm_before', 'norm2': 'layernorm_after',
               'mixer.qkv': 'attention.attention.query attention.attention.key attention.attention.value',
               'mixer.proj': 'attention.output.dense',
               'up': 'intermediate.dense', 'down': 'output.dense', 'head': 'classifier'},
        sizes={'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size',
               'n_inner': 'intermediate_size', 'block_size': 'image_size', 'patch': 'patch_size'},
        optional={}, eps=('layer_norm_eps', 1e-12), tied=True,
        config={**ENCODER, 'post_norm': False, 'pooler': False, 'cls': True, 'vocab_size': 256},
        says={}, known={'hidden_act': ('gelu',), 'qkv_bias': (True,), 'num_channels': (3,),
                        'problem_type': (None, 'single_label_classification')})}
WRITTEN = 'gpt2', 'llama', 'bert'
TYPES = 'embeddings.token_type_embeddings.weight'       # of BERT: added to all places of a text
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'   # of its rope


def modules(config):
    """Each module of a softmax model: number of its layer (None: outside), our name, rows of the parts that
    it is put together of, columns (0: it is a vector), whether it has a bias."""
    d = config['n_embd']
    kv = d // config['n_head'] * (config['n_kv_head'] or config['n_head'])
    inner = config['n_inner'] or 4 * d
    bias = config['bias']
    patch = config.get('patch', 0)
    places = config['block_size']
    up = [inner]
    if config['act'] == 'swiglu':
        up = [inner, inner]
    if patch:
        places = places // patch + 1                    # and cls
        yield None, 'embed', [d], patch, True
        yield None, 'cls', [1], d, False
    else:
        yield None, 'embed', [config['vocab_size']], d, False
    if config['pos'] == 'learned':
        yield None, 'positions', [places], d, False
    for i in range(config['n_layer']):
        yield i, 'norm1', [d], 0, bias
        yield i, 'mixer.qkv', [d, kv, kv], d, bias
        yield i, 'mixer.proj', [d], d, bias
        yield i, 'norm2', [d], 0, bias
        yield i, 'up', up, d, bias
        yield i, 'down', [d], inner, bias
    yield None, 'norm', [d], 0, bias
    if config.get('pooler'):
        yield None, 'pooler', [d], d, True
    if config.get('classes'):
        yield None, 'head', [config['classes']], d, True
    elif not config['tied']:
        yield None, 'head', [config['vocab_size']], d, False


def place_of(i, module, config):
    """Layer and module by which theirs is named. With post_norm ours begin with the norm that in theirs ends
    the layer before."""
    if not config.get('post_norm') or module not in ('norm', 'norm1'):
        return i, module
    if module == 'norm':
        i = config['n_layer']
    if i == 0:
        return None, 'first norm'
    return i - 1, 'norm1'


def layout(config, family, prefix):
    """Where each parameter of a softmax model is in a file of the hub: our name, {their name: shape} of its
    parts, and whether they are turned."""
    for i, module, rows, columns, bias in modules(config):
        ours = module
        if i is not None:
            ours = f'blocks.{i}.{module}'
        layer, theirs = place_of(i, module, config)
        front = prefix
        if layer is not None:
            front = prefix + family.layer.replace('*', str(layer))
        if module == 'head':
            front = ''
        names = [front + name for name in family.names[theirs].split()]
        if len(names) == 1:
            rows = [sum(rows)]
        turned = False
        shapes = [(n,) for n in rows]
        if columns:
            turned = family.turned and i is not None
            shapes = [(n, columns) for n in rows]
        if turned:
            shapes = [(columns, n) for n in rows]
        yield f'{ours}.weight', {f'{name}.weight': shape for name, shape in zip(names, shapes)}, turned
        if bias:
            yield f'{ours}.bias', {f'{name}.bias': (n,) for name, n in zip(names, rows)}, False


def their_config(path, name):
    """A config.json -> the kind of model, a dict of fields of Config. name: what a message calls the file.
    ValueError if it is broken, or tells of what this project cannot compute exactly."""
    try:
        raw = json.loads(prepare.read(path))
        if isinstance(raw, dict) and raw.get('model_type') == OURS:
            return raw.pop('model_type'), raw
        problem = foreign(raw)
        if problem:
            raise ValueError(f'{problem}; known are GPT-2, Llama, BERT and ViT as they were published')
        return raw['model_type'], translated(raw, FAMILIES[raw['model_type']])
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'{name}: {e}') from None


def foreign(raw):
    """What of a config.json cannot be computed here, in words, or None."""
    if not isinstance(raw, dict):
        return f'{json.dumps(raw)[:40]} is no description of a model'
    kind = raw.get('model_type')
    if kind not in [*FAMILIES]:
        return f'model_type {kind}'
    for key, values in FAMILIES[kind].known.items():
        if raw.get(key, values[0]) not in values:
            return f'{key} {raw[key]}'
    for key in ('rope_parameters', 'rope_scaling'):
        way = type_of_rope(raw.get(key) or {})
        if way not in ('default', 'llama3'):
            return f'rope of type {way}'
    for name in raw.get('architectures') or []:
        if name.endswith(('ForTokenClassification', 'ForMultipleChoice')):
            return f'{name}, which has a class for something else than a whole text'


def type_of_rope(rope):
    """What rope_parameters, or rope_scaling in older files, call themselves."""
    return rope.get('rope_type', rope.get('type', 'default'))


def scaling_of(rope):
    """The four numbers of Llama 3.1's rope, see model.speeds; of a plain one none. ValueError for others."""
    if type_of_rope(rope) == 'default':
        return []
    found = [rope.get(key) for key in LLAMA3]
    numbers = [x for x in found if type(x) in (int, float) and x > 0]
    if numbers != found or found[1] >= found[2]:
        given = ', '.join(f'{key} {x!r}' for key, x in zip(LLAMA3, found))
        raise ValueError(f'rope of type llama3 with {given}; expected numbers above 0, and high above low')
    return found


def translated(raw, family):
    """The fields of Config that a config.json gives. ValueError if one lacks or does not fit the others."""
    eps, usual = family.eps
    rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
    config = {'rule': 'softmax', **family.config}
    config.setdefault('tied', bool(raw.get('tie_word_embeddings', family.tied)))
    config['eps'] = float(raw.get(eps, usual))
    config['theta'] = float(raw.get('rope_theta') or rope.get('rope_theta') or 1e4)
    config['rope_scaling'] = scaling_of(rope)
    for field, key in {**family.sizes, **family.optional}.items():
        config[field] = raw.get(key)
        if field in family.optional and not config[field]:
            config[field] = 0
        elif type(config[field]) is not int or config[field] < 1:
            raise ValueError(f'{key} is {config[field]!r}, expected a whole number of at least 1')
    if 'patch' in family.sizes:                     # of pictures; ours count numbers, of three colours
        side = config['block_size']
        p = config['patch']
        if side % p:
            raise ValueError(f'patch_size {p} does not divide image_size {side}')
        config['block_size'] = 3 * side * side
        config['patch'] = 3 * p * p
    head_dim, rest = divmod(config['n_embd'], config['n_head'])
    if rest or raw.get('head_dim') not in (None, head_dim):
        raise ValueError(f'head_dim is not the width {config["n_embd"]} / {config["n_head"]} heads')
    return config


# ---- folders in the hub's layout ---------------------------------------------------------------------------


def from_folder(folder, source):
    """A folder with config.json and *.safetensors -> tensors in our names (fp32), config (a dict of fields of
    Config), data (what a checkpoint says of the tokens, by tokenizer.json). Every tensor is read once and its
    shape compared. source: what messages call the model. ValueError for what is missing, broken or does not
    fit; without a tokenizer.json tokens are but numbers."""
    path = os.path.join(folder, 'config.json')
    kind, config = their_config(path, path)
    where = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith('.safetensors'):
            path = os.path.join(folder, file)
            where.update({called(name): (path, name) for name in names_in(path, path)})
    if not where:
        raise ValueError(f'{folder}: no model.safetensors; pickled weights (.bin, .pt) are not read')
    if kind == OURS:
        data = config.pop('data', {'tokenizer': 'ids', 'vocab_size': config.get('vocab_size')})
        if os.path.exists(os.path.join(folder, TOKENIZER)):
            data['json'] = prepare.read(os.path.join(folder, TOKENIZER)).decode()
        return {name: tensor(where, name, None, source) for name in where}, config, {**data, 'name': source}
    data = data_of(folder, config, source)
    family = FAMILIES[kind]
    prefix = family.prefix
    if not any(name.startswith(prefix) for name in where):
        prefix = ''
    if not config.get('causal'):
        config['classes'] = classes_of(where, source)
        config['pooler'] = config['pooler'] and f'{prefix}pooler.dense.weight' in where
    tensors = {}
    for name, parts, turned in layout(config, family, prefix):
        found = [tensor(where, part, parts[part], source) for part in parts]
        x = found[0]
        if len(found) > 1:
            x = torch.cat(found)
        if turned:
            x = x.mT
        tensors[name] = x.float().contiguous()
    if kind == 'bert':
        tensors['positions.weight'] += tensor(where, prefix + TYPES, None, source)[0]
    if kind == 'vit':                                       # theirs are x / 127.5 - 1, ours x / 255
        beside = os.path.join(folder, PIXELS)
        if os.path.exists(beside):
            refuse_pixels(beside, beside)
        tensors['embed.bias'] -= tensors['embed.weight'].sum(1)
        tensors['embed.weight'] *= 2
    return tensors, config, data


def data_of(folder, config, source):
    """What data says of the tokens of a model of the hub; a ViT reads but pictures of its size."""
    data = {'name': source, 'vocab_size': config['vocab_size']}
    if config['patch']:
        return {**data, 'tokenizer': 'ids', 'row': config['block_size'], 'patch': config['patch']}
    if config.get('pad') is not None:
        data['pad'] = config['pad']
    return {**data, **tokenizer_of(folder, config['vocab_size'])}


def called(name):
    """A tensor's name as all others are: in old files a LayerNorm has gamma and beta (bert-base-uncased), and
    in a ViT the tables of places are not modules."""
    name = re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name)
    name = re.sub(r'LayerNorm\.beta$', 'LayerNorm.bias', name)
    return re.sub('(cls_token|position_embeddings)$', r'\1.weight', name)


def classes_of(where, source):
    """How many classes an encoder tells apart, 0 without a classifier."""
    if 'classifier.weight' not in where:
        return 0
    classes = len(tensor(where, 'classifier.weight', None, source))
    if classes == 1:
        raise ValueError(f'{source}: classifier.weight has one row: it says a number, not which of at least '
                         '2 classes')
    return classes


def refuse_pixels(path, name):
    """ValueError where a ViT's preprocessor_config.json wants other pixels than from -1 to 1; name: what a
    message calls the file."""
    half = [0.5] * 3
    known = {'do_normalize': True, 'image_mean': half, 'image_std': half}
    try:
        raw = json.loads(prepare.read(path))
        for key, value in known.items():
            if raw.get(key, value) != value:
                raise ValueError(f'{key} is {raw[key]}, expected {value}: a ViT of other pixels is not read')
    except (ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f'{name}: {e}') from None


def tokenizer_of(folder, vocab):
    """What data says of the tokens of a model with so many. ValueError for a tokenizer.json of other tokens;
    as vocabularies are rounded up, a tenth of them need not be there."""
    path = os.path.join(folder, TOKENIZER)
    there = os.path.exists(path)
    if vocab == 50257 and (not there or is_gpt2(path)):
        return {'tokenizer': 'gpt2'}
    if not there:
        return {'tokenizer': 'ids', 'missing': path}
    prepare.package()                                       # not here: the file is not to blame
    try:
        text = json.dumps(json.loads(prepare.read(path)), ensure_ascii=False, separators=(',', ':'))
        most = max(prepare.subwords(text).get_vocab().values()) + 1
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path}: {e}; repair it, or take it away: tokens are then but numbers') from None
    if not 0.9 * vocab <= most <= vocab:
        raise ValueError(f'{path}: {most:,} tokens, the model has {vocab:,}; put the one there that belongs '
                         'to the model, or take it away: tokens are then but numbers')
    return {'tokenizer': 'json', 'json': text}


def is_gpt2(path):
    """Whether a tokenizer.json has GPT-2's tokens, in its order: these tiktoken reads, which is faster."""
    try:
        ids = json.loads(prepare.read(path))['model']['vocab']
        tokens = sorted(ids, key=ids.get)[:50256]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False                                        # what is broken is told of where it is used
    return prepare.short_hash('\n'.join(tokens).encode()) == '3a1f1c01'


def names_in(path, name):
    """The names of the tensors in a safetensors file; name: what a message calls it."""
    try:
        with safe_open(path, 'pt') as f:
            return list(f.keys())
    except (SafetensorError, OSError) as e:
        raise ValueError(f'{name}: not a whole safetensors file ({e})') from None


def tensor(where, name, shape, source):
    """One tensor of a file, of this shape (None: any). A private map of it, opened anew for each: what is
    only copied from (to be turned, joined or made fp32) does not stay in memory."""
    if name not in where:
        raise ValueError(f'{source}: tensor {name} is missing')
    path, stored = where[name]
    with safe_open(path, 'pt') as f:
        x = f.get_tensor(stored)
    if shape is None:
        return x
    if x.dim() == 3:                                # a ViT's places: those of one picture
        x = x.squeeze(0)
    if x.dim() == 4:                                # its convolution, which looks at a patch at a time
        x = x.flatten(1)
    if x.shape != shape:
        raise ValueError(f'{source}: {name} has shape {tuple(x.shape)}, expected {shape}')
    return x


def to_folder(folder, tensors, config, data):
    """Tensors in our names -> model.safetensors and config.json: as the hub keeps GPT-2, Llama or BERT, if
    that is what they are (softmax in every layer); else in our own names, with our config and data, what a
    checkpoint says of the tokens. And tokenizer.json, if data has it."""
    known = ['tokenizer', 'vocab_size', 'chars', 'pad']
    if 'source' in data:
        known += ['source', 'row']
    of_tokens = {key: data[key] for key in known if key in data}
    raw = {'model_type': OURS, 'data': of_tokens, **config}
    kind = family_of(config)
    if kind:
        family = FAMILIES[kind]
        raw = {'model_type': kind, 'tie_word_embeddings': config['tied'], family.eps[0]: config['eps']}
        raw.update(family.says)
        if config['pos'] == 'rope':
            raw['rope_theta'] = config['theta']
        if config['rope_scaling']:
            raw['rope_scaling'] = {'rope_type': 'llama3', **dict(zip(LLAMA3, config['rope_scaling']))}
        # where ours says 0
        as_many = {'n_inner': 4 * config['n_embd'], 'n_kv_head': config['n_head'], 'pad': 0}
        for field, key in {**family.sizes, **family.optional}.items():
            raw[key] = config[field] or as_many[field]
        theirs = {}
        if kind == 'bert':
            raw.update(of_classes(config['classes']))
            theirs[family.prefix + TYPES] = torch.zeros(2, config['n_embd'])
        for name, parts, turned in layout(config, family, family.prefix):
            x = tensors[name]
            if turned:
                x = x.mT
            rows = [shape[0] for shape in parts.values()]
            theirs.update(zip(parts, x.split(rows)))
        tensors = theirs
    replace(os.path.join(folder, 'model.safetensors'), tensors, {'format': 'pt'})
    prepare.write(os.path.join(folder, 'config.json'), [json.dumps(raw, indent=1).encode()])
    if 'json' in data:
        prepare.write(os.path.join(folder, TOKENIZER), [data['json'].encode()])


def of_classes(classes):
    """What a config.json says of so many classes, or of none."""
    if not classes:
        return {'architectures': ['BertModel']}
    names = {str(i): f'LABEL_{i}' for i in range(classes)}
    return {'architectures': ['BertForSequenceClassification'], 'id2label': names}


def family_of(config):
    """The family that has a model of this config, and is written, or None."""
    rules = config['layers'] or config['rule']
    for kind in WRITTEN:
        same = [config[field] == value for field, value in FAMILIES[kind].config.items()]
        if all(same) and {rule.strip() for rule in rules.split(',')} == {'softmax'}:
            return kind


# ---- the hub -----------------------------------------------------------------------------------------------

HUB = {     # short name: repository, revision
    'gpt2': ('openai-community/gpt2', '607a30d783dfa663caf39e06633721c8d4cfcd7e'),
    'gpt2-medium': ('openai-community/gpt2-medium', 'main'),
    'gpt2-large': ('openai-community/gpt2-large', 'main'),
    'gpt2-xl': ('openai-community/gpt2-xl', 'main'),
    'bert-base-uncased': ('google-bert/bert-base-uncased', 'main')}
PINNED = {  # revision/file: bytes, sha256; of the others the hub itself says them
    '607a30d783dfa663caf39e06633721c8d4cfcd7e/model.safetensors':
    (548105171, '248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707')}
INDEX = 'model.safetensors.index.json'
TOKENIZER = 'tokenizer.json'
PIXELS = 'preprocessor_config.json'


def hub(name, revision='main', root=None):
    """config.json, weights and, if there is one, tokenizer.json of a hub repository, or what a ViT says of
    pixels -> their folder; what is not there yet is fetched.

    name: OWNER/NAME, or one of `HUB`. root: where such folders lie; None: data/hub. The environment's
    HF_ENDPOINT is another address of the hub, HF_TOKEN opens private models. What comes is looked at before
    it is kept: after a ValueError nothing that is wrong is left, and the next call tries again.
    """
    repo, pinned = HUB.get(name, (name, 'main'))
    if revision == 'main':
        revision = pinned
    site = f'{prepare.endpoint()}/{repo}'
    base = f'{site}/resolve/{revision}'
    root = root or os.path.join(prepare.HERE, 'hub')
    folder = os.path.join(root, f'{repo.replace("/", "--")}--{revision[:12]}')
    if not get(base, folder, 'config.json'):
        raise ValueError(f'{site}: no such model at revision {revision}')
    index = os.path.join(folder, INDEX)
    if not any(os.path.exists(path) for path in (index, os.path.join(folder, 'model.safetensors'))):
        kind, _ = their_config(os.path.join(folder, 'config.json'), site)
        get(base, folder, PIXELS if kind == 'vit' else TOKENIZER)       # later it was asked for already
    if not os.path.exists(index) and get(base, folder, 'model.safetensors'):
        return folder
    if not get(base, folder, INDEX):
        raise ValueError(f'{site}: neither model.safetensors nor its index; pickled weights (.bin, .pt) are '
                         'not read')
    for shard in shards(index, index):
        if not get(base, folder, shard):
            raise ValueError(f'{site}: {shard} is missing')
    return folder


def get(base, folder, file):
    """Have one file of a repository in its folder -> whether there is such a file."""
    import requests
    path = os.path.join(folder, file)
    url = f'{base}/{file}'
    if os.path.exists(path):
        return True
    headers = {}
    if os.environ.get('HF_TOKEN'):
        headers['Authorization'] = f'Bearer {os.environ["HF_TOKEN"]}'
    try:
        reply = requests.head(url, headers=headers, timeout=(10, 30))
    except requests.RequestException as e:
        raise ValueError(f'{url}: {type(e).__name__} (no file or folder here has that name, so the hub was '
                         f'asked); or put the file at {path} by hand') from None
    if reply.status_code in (401, 403):
        raise ValueError(f'{url}: HTTP {reply.status_code}; a private or gated model needs HF_TOKEN')
    if reply.status_code == 404:
        return False
    size, sha256 = PINNED.get(url.partition('/resolve/')[2], promised(reply))
    new = path + '.new'
    try:
        prepare.download(url, new, size, sha256, headers)
        look(new, file, url)
        os.replace(new, path)
    finally:
        if os.path.exists(new):
            os.remove(new)
    return True


def promised(reply):
    """The size and sha256 that the hub says a large file has, None where it says neither."""
    size = reply.headers.get('X-Linked-Size', '')
    sha256 = reply.headers.get('X-Linked-Etag', '').strip('"')
    if not re.fullmatch('[0-9a-f]{64}', sha256):
        sha256 = None
    if not size.isdecimal():
        return None, sha256
    return int(size), sha256


def look(path, file, url):
    """ValueError unless what came from url is what a file of that name holds."""
    if file == 'config.json':
        their_config(path, url)
    elif file == INDEX:
        shards(path, url)
    elif file == TOKENIZER:
        refuse_other(path, url)
    elif file == PIXELS:
        refuse_pixels(path, url)
    else:
        names_in(path, url)


def refuse_other(path, name):
    """ValueError for what is no tokenizer.json, as far as JSON can tell; name: what a message calls it."""
    try:
        json.loads(prepare.read(path))['model']['vocab']
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f'{name}: no description of a tokenizer ({type(e).__name__}: {e})') from None


def shards(path, name):
    """The files that an index of weights names; name: what a message calls the index."""
    try:
        files = json.loads(prepare.read(path))['weight_map'].values()
        return sorted({os.path.basename(file) for file in files})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f'{name}: no index of weights ({type(e).__name__}: {e})') from None
