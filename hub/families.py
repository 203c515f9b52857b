"""GPT-2, Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Olmo Hybrid, BERT, ViT: how the hub stores each, as a
table that is used in both directions.

    kind, config = kind_and_config(json.load(open('FOLDER/config.json')))       # of Config; ends, labels
    published(kind, config)                                             # and back

BERT and ViT are encoders. We read their classifier head, if the folder has one (ForSequenceClassification or
ForImageClassification), but not BERT's heads for masked words and next sentences. Our BERT reads one text.
BERT adds one vector to all positions of a first text and another to those of a second. We add the first
vector to the position embeddings and drop the second. preprocessor_config.json of a ViT must scale pixels as
published. We cannot write ViT. Of Qwen3.5 we read the text model.
"""
import re
from typing import NamedTuple

from common.flags import by_layer

ALL_SOFTMAX = {'full_attention': 'softmax'}
WITH_MATRIX = {**ALL_SOFTMAX, 'linear_attention': 'gated_delta'}
NONE = {}


class Family(NamedTuple):
    """How the hub stores one kind of model. In names, {i} is the number of a layer, {next} that of the next
    layer, {p} is weight or bias. (a|b) are several tensors of theirs, whose rows we stack in one; [a|b] two,
    whose rows take turns in ours. A final .even or .odd: of their heads every second one is ours. A final .T
    means that theirs is transposed, .conv also that it has one more axis; +1 that ours is 1 more. Tensors
    that a model lacks, such as biases or a head, are skipped."""
    names: dict     # ours -> theirs
    entries: dict   # field of Config -> entry of config.json
    usual: dict     # field whose entry may be missing -> its default
    config: dict    # fields of Config that all models of this kind share
    known: dict     # entry of config.json -> values we accept; the first is the default, and is written
    rules: dict = ALL_SOFTMAX       # what layer_types may say -> our rule
    linear: dict = NONE     # names in layers with a matrix, where they are others
    absent: dict = NONE     # what entries about the kinds of layers are, where config.json has none


PLAIN = {'conv': 0, 'qk_norm': False, 'qk_norm_all': False, 'norm_after': False, 'qkv_bias': False,
         'cache_gate': ''}
DECODER = {**PLAIN, 'causal': True, 'encoder': 0, 'classes': 0, 'patch': 0, 'post_norm': False}
ENCODER = {**PLAIN, 'causal': False, 'pool': 'first', 'pos': 'learned', 'act': 'gelu-erf', 'bias': True,
           'rms': False, 'n_kv_head': 0, 'head_dim': 0, 'rope_share': 1.0, 'tied': True}


SIZES = {'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size',
         'n_inner': 'intermediate_size'}


TEXT_SIZES = {**SIZES, 'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings'}
NO = (False, None)
LLAMA = Family(
    names={'embed.weight': 'model.embed_tokens.weight',
           'blocks.{i}.norm1.weight': 'model.layers.{i}.input_layernorm.weight',
           'blocks.{i}.mixer.qkv.{p}': 'model.layers.{i}.self_attn.(q|k|v)_proj.{p}',
           'blocks.{i}.mixer.q_norm.weight': 'model.layers.{i}.self_attn.q_norm.weight',
           'blocks.{i}.mixer.k_norm.weight': 'model.layers.{i}.self_attn.k_norm.weight',
           'blocks.{i}.mixer.proj.weight': 'model.layers.{i}.self_attn.o_proj.weight',
           'blocks.{i}.norm2.weight': 'model.layers.{i}.post_attention_layernorm.weight',
           'blocks.{i}.up.weight': 'model.layers.{i}.mlp.(gate|up)_proj.weight',
           'blocks.{i}.down.weight': 'model.layers.{i}.mlp.down_proj.weight',
           'norm.weight': 'model.norm.weight',
           'head.weight': 'lm_head.weight'},
    entries={**TEXT_SIZES, 'n_kv_head': 'num_key_value_heads', 'head_dim': 'head_dim', 'eps': 'rms_norm_eps',
             'theta': 'rope_theta', 'tied': 'tie_word_embeddings'},
    usual={'block_size': 2048, 'n_kv_head': 0, 'head_dim': 0, 'eps': 1e-6, 'theta': 1e4, 'tied': False},
    config={**DECODER, 'pos': 'rope', 'act': 'swiglu', 'bias': False, 'rms': True, 'rope_share': 1.0},
    known={'hidden_act': ('silu',), 'attention_bias': NO, 'mlp_bias': NO})
WINDOWS = {'full_attention': 'softmax', 'sliding_attention': 'window'}
NO_MATRIX = {'overflow': '', 'positions': 'true'}       # beside a window
SMALLER = {'absent': {'use_sliding_window': False, 'sliding_window': 4096, 'max_window_layers': 28},
           'rules': WINDOWS}
QWEN35 = {      # their norms multiply by 1 + w; q_proj has queries and gates, head by head
    **{name: f'{theirs}+1' for name, theirs in LLAMA.names.items() if 'norm' in name},
    'blocks.{i}.mixer.qkv.weight':
        'model.layers.{i}.self_attn.(q_proj.weight.even|k_proj.weight|v_proj.weight)',
    'blocks.{i}.mixer.gate.weight': 'model.layers.{i}.self_attn.q_proj.weight.odd'}
QWEN35_MATRIX = {
    'blocks.{i}.mixer.qkv.weight': 'model.layers.{i}.linear_attn.in_proj_qkv.weight',
    'blocks.{i}.mixer.conv.weight': 'model.layers.{i}.linear_attn.conv1d.weight.conv',
    'blocks.{i}.mixer.gate.weight': 'model.layers.{i}.linear_attn.in_proj_z.weight',
    'blocks.{i}.mixer.memory.gates.proj.weight': 'model.layers.{i}.linear_attn.in_proj_[b|a].weight',
    'blocks.{i}.mixer.memory.gates.log_rate': 'model.layers.{i}.linear_attn.A_log',
    'blocks.{i}.mixer.memory.gates.bias_f': 'model.layers.{i}.linear_attn.dt_bias',
    'blocks.{i}.mixer.out_norm.weight': 'model.layers.{i}.linear_attn.norm.weight',
    'blocks.{i}.mixer.proj.weight': 'model.layers.{i}.linear_attn.out_proj.weight'}
OLMO = {        # in layers of softmax norms come after, in those with a matrix before
    'blocks.{i}.norm1.weight': 'model.layers.{i}.post_attention_layernorm.weight',
    'blocks.{i}.norm2.weight': 'model.layers.{i}.post_feedforward_layernorm.weight'}
OLMO_MATRIX = {
    **QWEN35_MATRIX, **{name: LLAMA.names[name] for name in OLMO},
    'blocks.{i}.mixer.qkv.weight': 'model.layers.{i}.linear_attn.(q|k|v)_proj.weight',
    'blocks.{i}.mixer.conv.weight': 'model.layers.{i}.linear_attn.(q|k|v)_conv1d.weight.conv',
    'blocks.{i}.mixer.gate.weight': 'model.layers.{i}.linear_attn.g_proj.weight',
    'blocks.{i}.mixer.memory.gates.proj.weight': 'model.layers.{i}.linear_attn.[b|a]_proj.weight',
    'blocks.{i}.mixer.out_norm.weight': 'model.layers.{i}.linear_attn.o_norm.weight',
    'blocks.{i}.mixer.proj.weight': 'model.layers.{i}.linear_attn.o_proj.weight'}
MATRIX_SIZES = {'qkv_conv': 'linear_conv_kernel_dim', 'key_heads': 'linear_num_key_heads',
                'value_heads': 'linear_num_value_heads', 'key_dim': 'linear_key_head_dim',
                'value_dim': 'linear_value_head_dim'}
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
        config={**DECODER, 'pos': 'learned', 'act': 'gelu', 'bias': True, 'rms': False, 'n_kv_head': 0,
                'head_dim': 0, 'rope_share': 1.0},
        known={'activation_function': ('gelu_new', 'gelu_pytorch_tanh'), 'scale_attn_weights': (True,),
               'scale_attn_by_inverse_layer_idx': NO}),
    'llama': LLAMA,
    'mistral': LLAMA._replace(
        usual={**LLAMA.usual, 'block_size': 131072, 'n_kv_head': 8},
        config={**LLAMA.config, **NO_MATRIX}, rules=WINDOWS,
        absent={'use_sliding_window': True, 'sliding_window': 4096, 'max_window_layers': 0},
        known={'hidden_act': ('silu',), 'use_sliding_window': (True,),
               'layer_types': (None,)}),                                # with them it is a Ministral
    'qwen2': LLAMA._replace(
        usual={**LLAMA.usual, 'block_size': 32768, 'n_kv_head': 32},
        config={**LLAMA.config, **NO_MATRIX, 'qkv_bias': True},
        known={'hidden_act': ('silu',)}, **SMALLER),
    'qwen3': LLAMA._replace(
        usual={**LLAMA.usual, 'block_size': 32768, 'n_kv_head': 32, 'head_dim': 128},
        config={**LLAMA.config, **NO_MATRIX, 'qk_norm': True},
        known={'hidden_act': ('silu',), 'attention_bias': NO}, **SMALLER),
    'qwen3_5_text': LLAMA._replace(     # for text alone, its rope of three axes is a plain one
        names={**LLAMA.names, **QWEN35}, linear=QWEN35_MATRIX,
        entries={**LLAMA.entries, **MATRIX_SIZES, 'rope_share': 'partial_rotary_factor'},
        usual={**LLAMA.usual, 'block_size': 32768, 'n_kv_head': 4, 'head_dim': 256, 'rope_share': 0.25,
               'qkv_conv': 4},
        config={**DECODER, 'pos': 'rope', 'act': 'swiglu', 'bias': False, 'rms': True, 'qk_norm': True,
                'cache_gate': 'sigmoid', 'out_gate': 'silu', 'phi': 'identity', 'beta_max': 1.0},
        known={'hidden_act': ('silu',), 'attention_bias': NO, 'attn_output_gate': (True,)},
        rules=WITH_MATRIX),
    'olmo_hybrid': LLAMA._replace(
        names={**LLAMA.names, **OLMO}, linear=OLMO_MATRIX, entries={**LLAMA.entries, **MATRIX_SIZES},
        usual={**LLAMA.usual, 'block_size': 65536, 'qkv_conv': 4},
        config={**LLAMA.config, 'pos': 'none', 'qk_norm': True, 'qk_norm_all': True, 'norm_after': True,
                'out_gate': 'silu', 'phi': 'identity', 'beta_max': 2.0},
        known={**LLAMA.known, 'linear_allow_neg_eigval': (True,), 'rope_theta': (None,)}, rules=WITH_MATRIX),
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


WRITTEN = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
           'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'qwen3_5_text': 'Qwen3_5ForCausalLM',
           'olmo_hybrid': 'OlmoHybridForCausalLM', 'bert': 'BertModel'}
TYPES = 'bert.embeddings.token_type_embeddings.weight'          # added to all positions of a text
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'   # for rope


def names(kind, config, ours):
    """{our name: theirs} of one model of a family. ours: the names of its tensors"""
    layers = config['n_layer']
    family = FAMILIES[kind]
    table = {}
    for i in range(layers):
        of_layer = family.names
        if f'blocks.{i}.mixer.memory.gates.proj.weight' in ours:
            of_layer = {**family.names, **family.linear}
        for name, theirs in of_layer.items():
            for p in 'weight', 'bias':
                one = name.format(i=i, next=i + 1, p=p).replace(f'blocks.{layers}.norm1', 'norm')
                if one in ours:
                    table[one] = theirs.format(i=i, p=p)
    return table


def width_of_head(config):
    """The channels of a head of softmax"""
    return config['head_dim'] or config['n_embd'] // config['n_head']


def parts(theirs, x, config):
    """Split our tensor x into theirs -> {their name: a view of x}"""
    plain = re.sub(r'(\.T|\.conv|\+1)$', '', theirs)
    if theirs.endswith(('.T', '.conv')):
        x = x.t()                                           # t() leaves a bias as it is
    if theirs.endswith('.conv'):
        x = x[:, None]
    elif x.dim() == 3:                                      # one number for each head
        x = x.flatten()
    if '|' not in plain:
        return {plain: x}
    front, middle, end = re.split(r'[][()]', plain)
    their_names = [front + part + end for part in middle.split('|')]
    if '[' in plain:
        return dict(zip(their_names, x.unflatten(0, (-1, 2)).unbind(1)))
    n = len(x)
    cuts = [n // 2]
    if len(their_names) == 3:                               # queries, then keys and values
        n_query = config['n_head'] * width_of_head(config)
        cuts = [n_query, (n + n_query) // 2]
        if '.linear_attn.' in theirs:                       # queries are as wide as keys
            n_query = config['key_heads'] * config['key_dim']
            cuts = [n_query, 2 * n_query]
    return dict(zip(their_names, x.tensor_split(cuts)))


def kind_and_config(raw):
    """The content of a config.json -> kind of model, dict of fields of Config. ValueError for a model that we
    cannot compute exactly, and if an entry is missing or contradicts another."""
    kind = raw.pop('model_type', None)
    if kind == 'qwen3_5' and 'text_config' in raw:          # beside its vision
        raw = {**raw['text_config'], **raw}
        kind = raw['text_config'].get('model_type')
    if kind not in FAMILIES:
        raise ValueError(f'model_type {kind}; known are GPT-2, Llama, Mistral, Qwen2, Qwen3, Qwen3.5 (its '
                         'text model), Olmo Hybrid, BERT and ViT')
    family = FAMILIES[kind]
    rope = {}
    for key in 'rope_scaling', 'rope_parameters':           # older files, newer files
        rope.update(raw.get(key) or {})
    raw = {**raw, **rope}                                   # newer files have rope_theta in there
    for key, values in family.known.items():
        if raw.get(key, values[0]) not in values:
            raise ValueError(f'{key} {raw[key]}, expected {" or ".join(map(str, values))}')
    config = {'classes': 0, 'ends': raw.get('eos_token_id'), 'labels': raw.get('id2label'), **family.config}
    for name in raw.get('architectures') or []:
        if name.endswith(('ForTokenClassification', 'ForMultipleChoice')):
            raise ValueError(f'{name} has a class for something else than a whole text')
        if name.endswith('Classification'):
            if config['causal']:
                raise ValueError(f'{name}: a classifier is read from BERT and ViT; take the language model')
            config['classes'] = 1           # at least: the file says how many
    config['rope_scaling'] = scaling_of(rope)
    if 'rope_share' not in family.entries and raw.get('partial_rotary_factor') not in (None, 1):
        raise ValueError(f'partial_rotary_factor {raw["partial_rotary_factor"]}, expected 1')
    for field, key in family.entries.items():
        config[field] = entry(raw, key, family.usual.get(field))
    config.update(rules_of_layers(family, raw, config['n_layer']))
    if 'key_dim' in config:         # they divide q by sqrt(key_dim), so what we read is larger
        eps = 1e-5 if kind == 'olmo_hybrid' else config['eps']
        config['out_eps'] = eps * config['key_dim']
    if 'patch' in family.entries:                   # a picture model: ours counts numbers, 3 per pixel
        config['block_size'] = 3 * config['block_size'] ** 2
        config['patch'] = 3 * config['patch'] ** 2
    return kind, config


def rules_of_layers(family, raw, n):
    """The fields of Config that say which rules n layers have."""
    if family.rules == ALL_SOFTMAX:
        return {'rule': 'softmax', 'layers': ''}
    raw = {**family.absent, **raw}
    types = raw.get('layer_types') or []
    slides = entry(raw, 'use_sliding_window', False) and raw.get('sliding_window') is not None
    if not types and family.absent:
        first = entry(raw, 'max_window_layers', 0) if slides else n
        types = ['full_attention' if i < first else 'sliding_attention' for i in range(n)]
    if len(types) != n or not set(types) <= family.rules.keys():
        kinds = ', '.join(sorted(map(str, set(types))))
        raise ValueError(f'layer_types: {len(types)} of {kinds}, expected {n} of {", ".join(family.rules)}')
    rules = [family.rules[what] for what in types]
    found = {'rule': rules[0], 'layers': ','.join(rules)}
    if 'window' in rules:                                   # theirs counts the token itself
        found['cache'] = entry(raw, 'sliding_window', None) - 1
    return found


def entry(raw, key, usual):
    """An entry of a config.json, or its default. usual: the default; None: it must be there"""
    value = raw.get(key)
    if value is None:
        value = usual
    if value is None:
        raise ValueError(f'{key} is missing')
    return value


def scaling_of(rope):
    """The four numbers of Llama 3.1's rope (see model.speeds); [] for plain rope. ValueError for others."""
    way = rope.get('rope_type', rope.get('type'))
    if way == 'default' or (way is None and 'factor' not in rope):
        return []
    if way != 'llama3':
        raise ValueError(f'rope of type {way}, expected default or llama3')
    return [entry(rope, key, None) for key in LLAMA3]


def published(kind, config):
    """The inverse of `kind_and_config`: a config -> the content of a config.json."""
    family = FAMILIES[kind]
    raw = {'model_type': kind, 'architectures': [WRITTEN[kind]]}
    raw.update({key: values[0] for key, values in family.known.items() if values[0] is not None})
    as_many = {'n_inner': 4 * config['n_embd'], 'n_kv_head': config['n_head'], 'pad': 0,    # if ours is 0
               'head_dim': width_of_head(config)}
    for field, key in family.entries.items():
        raw[key] = config[field]
        if not config[field] and field in as_many:
            raw[key] = as_many[field]
    rules = by_layer(config['layers'], config['rule'], config['n_layer'])
    if len(family.rules) > 1 and 'layer_types' not in family.known:
        types = {rule: what for what, rule in family.rules.items()}
        raw['layer_types'] = [types[rule] for rule in rules]
    if 'sliding_window' in family.absent:
        slides = 'window' in rules
        raw.setdefault('use_sliding_window', slides)        # a Mistral knows no such switch
        raw['sliding_window'] = config['cache'] + 1 if slides else None
    if config['rope_scaling']:
        *factors, known = config['rope_scaling']
        raw['rope_scaling'] = {'rope_type': 'llama3', **dict(zip(LLAMA3, [*factors, int(known)]))}
    if kind == 'olmo_hybrid':
        raw['rope_theta'] = None            # transformers makes 10,000 of a missing one
    if config['classes']:
        raw['architectures'] = ['BertForSequenceClassification']
    return raw


def family_of(config, first=None):
    """The family of a model of this config, if we can write it; else None. first: the one to try first"""
    rules = set(by_layer(config['layers'], config['rule'], config['n_layer']))
    for kind in sorted(WRITTEN, key=lambda kind: kind != first):
        family = FAMILIES[kind]
        same = [config[field] == value for field, value in family.config.items()]
        mixes = len(rules) > 1 and 'layer_types' in family.known
        if all(same) and rules <= {*family.rules.values()} and not mixes:
            return kind
