"""GPT-2, Llama, BERT, ViT: how the hub stores each, as a table that is used in both directions.

    kind, config = kind_and_config(json.load(open('FOLDER/config.json')))       # of Config; ends, labels
    published(kind, config)                                             # and back

BERT and ViT are encoders. We read their classifier head, if the folder has one (ForSequenceClassification or
ForImageClassification), but not BERT's heads for masked words and next sentences. Our BERT reads one text.
BERT adds one vector to all positions of a first text and another to those of a second. We add the first
vector to the position embeddings and drop the second. preprocessor_config.json of a ViT must scale pixels as
published. We cannot write ViT.
"""
import math
from typing import NamedTuple


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


TEXT_SIZES = {**SIZES, 'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings'}
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
        entries={**TEXT_SIZES, 'n_kv_head': 'num_key_value_heads', 'eps': 'rms_norm_eps',
                 'theta': 'rope_theta', 'tied': 'tie_word_embeddings'},
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
        entries={**TEXT_SIZES, 'pad': 'pad_token_id', 'eps': 'layer_norm_eps'},
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
        config['block_size'] = 3 * config['block_size'] ** 2
        config['patch'] = 3 * config['patch'] ** 2
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
