"""Turn a pretrained transformer into an RNN: swap its attention, train, report what was recovered of it.

    python convert.py --from=FOLDER --data=my.txt --recipe=hybrid --dtype=bfloat16 --controls=false
                                            a real model, your text
    python convert.py                       one matrix per head (--recipe=pure), from out/ckpt.safetensors,
                                            a model of train.py --rule=softmax --n_head=4
    python convert.py --recipe=hybrid       64 cached tokens (189 of a large model), a matrix for all others
    python convert.py --recipe=hedgehog     Zhang 2024; also t2r: Kasai 2021; decay: Mao 2022
    python convert.py --from=gpt2 --data=wikitext2          a model of the hub
    python convert.py --from=OWNER/NAME --recipe=hedgehog --lora=8 --data=dialogues.txt:summaries.txt
                                            pairs: a line of one file, then of the other
    python convert.py --from=out/tuned/ckpt.safetensors --export=out/exported       a folder for transformers
    python sample.py --init=out/convert/ckpt.safetensors

A model of train.py's default size takes six minutes on one core, controls included. The steps, in order:

    swap         Make a student: the teacher's weights, but other rules in place of softmax. Feature maps and
                 gates are new parameters. The teacher's attention on 4,096 tokens says how some begin: slots
                 as clusters of its keys, gates so that a head remembers as far as its teacher sees (beside a
                 cache: for a row).
    distil       Stage 1 trains the new parameters, or whole mixers (attention layers). Each layer learns to
                 imitate the teacher's layer on the teacher's inputs.
    fine-tune    Stage 2 trains all weights (or LoRA's) to predict what the teacher predicts, or the text.
    fold         (--fold) Multiply T2R's feature map into W_q and W_k.
    controls     Train the teacher for as many more steps, at two learning rates, and train the student from
                 scratch: what these steps give without a teacher to imitate.

What is recovered is the teacher's perplexity over the student's (of a task: the student's accuracy over the
teacher's). A recipe is a list of flags (RECIPES). Flags that you give override it. Writes ckpt.safetensors,
log.jsonl, result.json (the student's figures) and convert.json into --out. convert.json has the table, how
much attention differs by layer (`order kept`: how often weights rank two keys as q.k does), and the attention
weights of one query. Columns: `low`, `high`, a 95 % interval over rows; `to 512`, what is recovered among the
tokens up to there in a row; `KL`, from the teacher's distribution to the model's, in nats; `of the tuned`,
against the better of the two teachers trained on. The table also has caches without a matrix, one of as many
tokens and some of as many bytes, and the models of --beside. A student with a limited cache is also run under
the policies that it was not trained with, and every student in one text as long as four rows.
"""
import copy
import dataclasses
import functools
import math
import sys
from dataclasses import dataclass

from common.errors import script      # before torch: common/__init__.py
import numpy as np
import torch
import torch.nn.functional as F

import models
import train
from common import files
from common.checks import idle
from common.flags import briefly, by_layer, flag, parse, refuse, subset, typed
from common.machine import commit, logits_at_once, pick_device, take_threads
from common.terminal import table
from common.weights import read_tensors, weights_digest
from data import prepare
from data.rows import TASK_ROWS, products_in, rows_of
from fastweight import RULES
from hub.folders import to_folder
from look.watch import compared, has_weights, through
from model import load, save
from models.files import fill, whole_config
from models.hybrid import HybridConfig
from runs.log import next_command, say
from runs.starts import PRETRAINED_LR, PRETRAINED_ROW, SMALL, is_large
from students.begin import balance, remember
from students.fold import can_fold, fold
from students.judge import part_recovered
from students.lora import adapt, merge_lora
from students.rivals import can_become_an_rnn, models_beside, rivals_of, under_policies
from students.stages import Conversion, checkpoints, forget
from train import LR


# Flags per recipe; `Args` explains them. The papers' recipes use their order of stages and losses, and their
# kind of feature map.
RECIPES = {
    'pure': '--rule=gla-beta --distil=hidden --faster=5',
    'hybrid': '--rule=sink --cache=64 --overflow=sum:slots --distil=mse --faster=5',
    'cache': '--rule=sink --cache=157 --steps=1300',        # as many bytes as hybrid keeps for heads of 32
    'hedgehog': '--rule=sum --phi=hedgehog:listing --distil=ce --loss=next',
    't2r': '--rule=sum --phi=t2r --distil=none --loss=next',
    'decay': '--rule=decay --distil=none --loss=next'}
# For a large teacher, which knows a lot, learns from little and would be destroyed by larger rates
LARGE_RECIPES = RECIPES | {
    'pure': '--rule=gla-beta --gate_rank=16 --distil=mse --faster=20 --distil_steps=80 --steps=408 --lr=1e-4',
    'hybrid': '--rule=sink --cache=189 --overflow=gated:slots:64 --positions=compress --distil=mse '
              '--faster=20',
    'cache': '--rule=sink --cache=253 --positions=compress --steps=488'}        # heads of 64
LARGE = '--batch_size=1 --distil_steps=8 --steps=480 --eval_rows=16'        # defaults with all of these
ATTENTIONS = 'self', 'cross', 'encoder'     # the attention layers of a translator; self: its decoder's
LONG = 1024                                             # most tokens per row without --row: T x T tensors
BEGIN = 4096                                            # tokens at which new parameters begin, see `begin_as`
SWAP_LR = 0.25                                          # divided by the width: 4e-3 at width 64, 1e-3 at 256
LORA_FASTER = 10                                        # its small matrices bear more, and begin at zero
TEACHER_LRS = 1e-3, 1e-4                                # learning rates of the teacher that trains on
LARGE_TEACHER_LRS = 1e-4, 3e-5                          # of a large one, which 1e-3 would destroy
OFTEN = 'from recipe data steps distil_steps lora row dtype controls out export resume'    # first in --help


@dataclass
class Args:
    recipe: str = flag('pure', 'what replaces softmax, and how it is trained: a list of flags; flags that '
                               'you give override it', list(RECIPES))
    from_: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2; OWNER/NAME; a folder', path=True)
    data: str = flag('', 'text, task, pairs or conversations; default: what train.py gave the teacher',
                     path=True)
    out: str = flag('out/convert', 'folder for the checkpoint, table and log', path=True)
    swap: str = flag(','.join(ATTENTIONS), 'in a translator: which attention to swap')
    distil: str = flag('auto', 'stage 1, layer by layer: new parameters match attention weights (ce) or '
                               'outputs (mse), whole mixers hidden states; auto: ce if there are weights, '
                               'else mse',
                       ['auto', 'ce', 'mse', 'hidden', 'none'])
    distil_steps: int = flag(300, 'steps of stage 1', low=0, high=10 ** 9)
    distil_lr: float = flag(1e-2, 'peak learning rate of stage 1', low=0, high=100)
    steps: int = flag(1000, 'steps of stage 2, fine-tuning', low=0, high=10 ** 9)
    lr: float = flag(None, f'peak learning rate of stage 2; default: {SWAP_LR:g} / width; of a large model, '
                     f'or of a cache, {PRETRAINED_LR:g} / width; with --lora ten times that', low=0,
                     high=100)
    faster: float = flag(1.0, 'stage 2: a factor on the learning rate of new parameters; with --lora, whose '
                              'rate is ten times as high, a recipe\'s is divided by ten', low=0, high=1000)
    loss: str = flag('kl', 'stage 2: predict the next token, or match the teacher (KL)', ['next', 'kl'])
    lora: int = flag(0, 'rank of LoRA on W_q, W_k, W_v, W_o in stage 2; 0: all weights', low=0, high=2 ** 17)
    batch_size: int = flag(4, 'rows per step', low=1, high=2 ** 20)
    keep: int = flag(0, 'so many layers stay softmax, spread over the depth', low=0, high=2 ** 16)
    row: int = flag(0, 'tokens per row; 0: as in the teacher\'s training, at most 1,024; of a large model '
                       'at most 512', low=0, high=2 ** 24)
    eval_rows: int = flag(64, f'validation rows for each evaluation; of a classifier {TASK_ROWS}', low=2,
                          high=10 ** 9)
    export: str = flag('', 'only write the model of --from into this folder, for transformers', path=True)
    fold: bool = flag(False, 'multiply phi into W_q and W_k at the end; needs --phi=t2r, no rope')
    beside: str = flag('', 'models to judge on the same rows, separated by commas: a cache of as many bytes '
                           'that was trained alike (--recipe=cache)', path=True)
    controls: bool = flag(True, 'also train the teacher for as many steps, at two rates, and the student '
                                'from scratch')
    eval_every: int = flag(250, 'steps between evaluations; each also saves, for --resume', low=1,
                           high=10 ** 9)
    resume: bool = flag(False, 'continue the stopped conversion in --out')
    seed: int = flag(0, 'seed of new weights and the data order', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda')
    dtype: str = flag('float32', 'in matrix products; S is always fp32', ['float32', 'bfloat16'])
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)


StudentFlags = subset(HybridConfig, 'layers', 'phi', 'norm', 'out_norm', 'beta_max', 'gate_rank', 'cache',
                      'sinks', 'overflow', 'positions', rule=flag('sum', 'what replaces softmax', RULES))
HELP = '\n'.join([
    __doc__ or '',
    'Recipes. Their flags replace the defaults below. With another --rule, only their training flags do:',
    *(f'    {name:<12} {row}' for name, row in RECIPES.items()),
    f'For a teacher of {SMALL // 10 ** 6} million parameters or more the defaults are',
    f'    {LARGE}',
    'and the recipes',
    *(f'    {name:<12} {row}' for name, row in LARGE_RECIPES.items() if row != RECIPES[name])])


# ---- the swap ----------------------------------------------------------------------------------------------
def swap(teacher, changes, places=ATTENTIONS):
    """Make a model with other rules, which shares the teacher's weights until they are trained -> student,
    names of its new parameters. changes: flags of `StudentFlags`; places: of a translator, which to swap"""
    # the teacher's model, but for its rules
    old = teacher.config
    pos = 'rope' if old.has_rope() else old.pos             # W_q and W_k were learned with rope: keep it
    student = models.changed(teacher, pos=pos, **rules_after(old, changes, places))
    # what has fast weights already keeps its map and its norm
    twins = student.mixers()
    for name, mixer in teacher.mixers().items():
        was = mixer.memory
        then = twins[name].memory
        stays = then.rule.matrix and was.rule.matrix and (then.spec, then.norm) == (was.spec, was.norm)
        if was.rule.matrix and not stays:
            raise ValueError(f'{name} of the teacher has fast weights already, with --phi={was.spec} '
                             f'--norm={was.norm}, which are flags of all layers: give these')
    if student.config.every_rule() == old.every_rule():
        raise ValueError(f'layers stay {briefly(old.every_rule())}: nothing would change; take another '
                         '--rule, --layers or --swap')
    # the teacher's weights, shared; what they lack is new
    missing, extra = fill(student, teacher.state_dict(),
                          'the teacher\'s weights do not fit these rules and maps',
                          strict=False, assign=True)
    if extra:
        raise ValueError(f'the teacher has {extra[0]}, which no rule of the student has room for')
    student.to(teacher.embed.weight.device).eval()
    return student, dict(student.named_parameters()).keys() & set(missing)


def rules_after(old, changes, places):
    """-> the changes, with the rule of every layer added. --rule replaces softmax in the given places; other
    rules stay. Softmax over a source also stays if --rule caches few tokens, since a source is read as a
    whole."""
    rule = changes.get('rule', old.rule)
    layers = old.rules
    if 'self' in places:
        layers = [rule if name == 'softmax' else name for name in layers]
    else:
        changes = {**changes, 'rule': old.rule}
    rules = {'layers': ','.join(layers)}
    if len(set(layers)) == 1:
        rules = {'rule': layers[0], 'layers': ''}
    of_source = getattr(old, 'source_rules', ())            # a translator's
    for place, field, name in zip(('encoder', 'cross'), ('encoder_rule', 'cross'), of_source):
        swaps = place in places and name == 'softmax' and not RULES[rule].bounded
        rules[field] = rule if swaps else name
    return {**rules, **changes}


@torch.no_grad()
def begin_as(teacher, student, x, pad=None):
    """Initialise new parameters from the teacher's attention on the tokens x (B, T): slots as clusters of its
    keys, gates by how far back the heads look (`remember`) and, beside a cache, the weight of the keys that
    only the matrix has (`balance`)."""
    for seen in through(teacher, x, pad):
        twin = student.get_submodule(seen.name)
        memory = twin.memory
        beside = getattr(memory, 'overflow', None)
        matrix = beside or memory
        swapped = seen.mixer.memory.rule.keeps              # the teacher has softmax there
        if seen.crosses or not (swapped and matrix.rule.matrix):        # positions of two texts: no distance
            continue
        if hasattr(matrix.phi, 'begin'):
            matrix.phi.begin(seen.seen_by(twin)[1])
        remember(seen, matrix.gates, beside_cache=beside is not None)
        if beside is not None:
            balance(seen, twin)


# ---- stage 1: layer by layer -------------------------------------------------------------------------------
def mixers_with(student, new):
    """The student's mixers that have new parameters, by name."""
    return {name: mixer for name, mixer in student.mixers().items()
            if any(parameter.startswith(f'{name}.') for parameter in new)}


def what_to_match(wish, student, new):
    """-> the kind of stage 1. `auto` becomes ce if all new mixers have attention weights, else mse. Without
    new parameters it is `none`."""
    if not new:
        return 'none'
    comparable = all(has_weights(mixer) for mixer in mixers_with(student, new).values())
    if wish == 'ce' and not comparable:
        raise ValueError('--distil=ce compares attention weights, and this rule has none: take mse or hidden')
    if wish == 'auto':
        wish = 'ce' if comparable else 'mse'
    return wish


def unshare(student, names):
    """Copy what training will change, so that the teacher keeps its own: the parameters of these names, and
    random features, which are redrawn. With LoRA the other weights stay shared and need no memory."""
    for name, p in student.named_parameters():
        if name in names:
            p.data = p.data.clone()
    for x in student.buffers():
        x.data = x.data.clone()


def mismatch(kind, seen, student):
    """The loss of stage 1: a scalar that compares a mixer (attention layer) of the student, or for `hidden` a
    block, with the teacher's, on the teacher's input. Mean over the positions without padding.
        hidden    mean square error of the block's output (MOHAWK, arXiv:2408.10189)
        ce        cross entropy -sum_s a_ts log w_ts of the teacher's weights a, the student's w (Zhang 2024,
                  eq. 4)
        mse       mean square error of the attention output, after the student's out_norm, divided by the
                  teacher's variance in these rows (LoLCATs, arXiv:2410.10254)
    seen: a `Seen`, which `through` yields for the teacher"""
    twin = student.get_submodule(seen.name)
    real = slice(None)
    if seen.real is not None:
        real = seen.real
    if kind == 'hidden':
        error = seen.result_of(student.get_submodule(seen.layer)) - seen.y
        return error.square().mean(-1)[real].mean()
    if kind == 'ce':
        a = seen.weights(seen.mixer)
        w = seen.weights(twin)
        return -(a * w.clamp(min=1e-8).log()).sum(-1).mean(1)[real].mean()
    wanted = seen.o                                          # (B, H, T, head_dim)
    output = seen.outputs(twin)
    if twin.out_norm is not None:
        output = twin.out_norm(output)
    error = (output - wanted).square().mean((1, 3))
    return error[real].mean() / wanted.transpose(1, 2)[real].var()


def distil(run, teacher, student, names, kind, steps, lr):
    """Stage 1: train the parameters of these names on `mismatch` of this kind. Every layer gets the teacher's
    input, so layers are independent, and backward holds the (T, T) matrices of only one at a time."""
    data = run.data

    def losses(step):
        begin = data.starts(step)
        for i in range(data.accum):
            x, _ = data.batch(begin, i)
            with torch.no_grad(), products_in(data.dtype, data.device):
                for seen in through(teacher, x, data.padding):
                    if seen.name not in compared_by:
                        continue
                    with torch.enable_grad():
                        far = mismatch(kind, seen, student)
                        if far.requires_grad:               # some kinds of loss do not use all parameters
                            yield far / data.accum

    unshare(student, names)
    for name, p in student.named_parameters():
        p.requires_grad_(name in names)
    mixers = [name for name in teacher.mixers()             # hidden compares a block at once
              if kind != 'hidden' or not name.endswith('.cross')]
    compared_by = set()                                     # those in whose layer something learns
    for mixer in mixers:
        layer = f'{mixer.rpartition(".")[0]}.'
        if any(name.startswith(layer) for name in names):
            compared_by.add(mixer)
    run.train_stage(f'distil ({kind})', student, losses, steps, lr, parts=len(compared_by))
    student.requires_grad_(True)


# ---- stage 2: the whole model ------------------------------------------------------------------------------
def divergences(model, teacher, data, step):
    """Like train.losses, but KL(teacher || model) where there are targets"""
    begin = data.starts(step)
    count = data.targets(begin)
    for i in range(data.accum):
        x, y = data.batch(begin, i)
        logits, _, _ = data.predict(model, x, y)
        with torch.no_grad():
            wanted, _, _ = data.predict(teacher, x, y)
            wanted = wanted.log_softmax(-1)
        yield F.kl_div(logits.log_softmax(-1), wanted, reduction='sum', log_target=True) / count


def finetune(run, stage, model, steps, lr, after=0, teacher=None, lora=0, new=()):
    """Stage 2 and the controls: train on the targets or, with a teacher, on its distribution at the same
    positions, KL(teacher || model). All weights learn. With lora > 0, only LoRA of that rank and the
    parameters in `new` learn. after: steps of the stage before, so that other rows are drawn."""
    def losses(step):
        if teacher is None:
            return train.losses(model, run.data, [None] * run.data.accum, after + step)
        return divergences(model, teacher, run.data, after + step)

    torch.manual_seed(run.args.seed)                        # for LoRA's A
    adapted = []
    if lora:
        adapted = adapt(model, lora, new)
    run.train_stage(stage, model, losses, steps, lr, new)
    merge_lora(adapted)
    model.requires_grad_(True)


def controls(run, teacher, cls, config, steps):
    """Run the controls, on the same rows and with as many steps as the student had in all. First the teacher
    learns the next token, at two rates; the larger one harms a converged teacher. The student is compared
    with the better one, as an undertrained teacher is easy to match. Then a student learns from scratch."""
    judge = run.judge
    rates = LARGE_TEACHER_LRS if is_large(teacher) else TEACHER_LRS
    if run.args.lora:                                       # which bears more
        rates = [LORA_FASTER * lr for lr in rates]
    for lr in rates:
        stage = f'control: teacher, {lr:g}'
        copied = copy.deepcopy(teacher)
        finetune(run, stage, copied, steps, lr, lora=run.args.lora)
        judge.add_line(stage, copied, steps)
    tuned = max(judge.lines[-len(rates):], key=lambda row: row['recovered'] or 0)
    torch.manual_seed(run.args.seed)
    anew = cls(config).to(run.data.device)
    finetune(run, 'control: from scratch', anew, steps, LR)
    judge.add_line('control: student from scratch', anew, steps)
    for row in judge.lines:
        row['of the tuned'] = part_recovered(row, tuned)


# ---- the run -----------------------------------------------------------------------------------------------
def flags_of(argv):
    """The given flags, with --resume also those of the stopped conversion -> flags of Args, of the student"""
    given, changes = parse(argv, HELP, Args, StudentFlags, first=OFTEN)
    if 'export' in given:
        refuse(not_exporting(given, changes))
    if given.get('resume'):
        began, began_changes = stopped(given, changes)
        return {**began, **given}, {**began_changes, **changes}
    return given, changes


def by_recipe(given, changes, teacher):
    """Merge the given flags with those of the recipe for such a teacher -> flags of Args, of the student"""
    # the recipe
    large = is_large(teacher)
    way = {}
    recipes = RECIPES
    if large:
        way, _ = parse(LARGE.split(), HELP, Args, StudentFlags)
        recipes = LARGE_RECIPES
    own, own_changes = parse(recipes[given.get('recipe', Args.recipe)].split(), HELP, Args, StudentFlags)
    # what of it suits the given rule, and this teacher
    own_rule = own_changes['rule']
    rule = changes.get('rule', own_rule)
    alike = rule == own_rule or {rule, own_rule} == {'window', 'sink'}
    if 'layers' in changes or not alike:                    # another rule: drop the recipe's map, norm, cache
        own_changes = {'rule': StudentFlags.rule}
    if not teacher.config.has_rope():                       # learned positions stay where they are
        own_changes.pop('positions', None)
    changes = {**own_changes, **changes}
    # rates and rows
    rules = by_layer(changes.get('layers'), changes['rule'], teacher.config.n_layer)
    bounded = any(RULES[name].bounded for name in rules if name in RULES)
    near = large or bounded                                 # what begins near its teacher may not leave it
    lr = (PRETRAINED_LR if near else SWAP_LR) / teacher.config.n_embd
    flags = {'lr': lr, 'faster': Args.faster, **way, **own}
    if teacher.task == 'classify':
        flags['eval_rows'] = TASK_ROWS                      # each row has one target alone
    if near and given.get('lora'):
        flags['lr'] *= LORA_FASTER
        flags['faster'] /= LORA_FASTER                      # new parameters learn as fast as without LoRA
    row = given.get('row') or min(teacher.config.block_size, PRETRAINED_ROW if large else LONG)
    return {**flags, **given, 'row': row}, changes


def not_exporting(given, changes):
    """For `refuse`: flags that go beyond writing a folder."""
    yield not given['export'], '--export=: give a folder'
    yield files.lies_in(given.get('from_', Args.from_), given['export']), (
        f'--export={given["export"]}: it holds the model of --from; take another folder')
    for name in sorted(given.keys() | changes.keys()):
        yield name not in ('export', 'from_', 'device', 'threads'), (
            f'--{name} means nothing: --export only writes the model of --from')


def stopped(given, changes):
    """The flags of the stopped conversion, as two dicts. Only --out and --device may differ."""
    out = given.get('out', Args.out)
    paths = checkpoints(out)
    if not paths:
        raise ValueError(f'--resume: no conversion was stopped in --out={out} (one that was finished has '
                         'nothing to resume); start anew')
    _, meta = read_tensors(paths[0])
    typed(Args, meta['args'], paths[0])                     # another version may have had others
    began = meta['args'] | meta['changes'] | {'resume': True}
    for name, value in (given | changes).items():
        if began.get(name) != value and name not in ('out', 'device'):
            raise ValueError(f'--{name.strip("_")}={value}: the run began with {began.get(name)!r}; leave '
                             'the flag out, or start anew without --resume')
    return meta['args'], meta['changes']


def cannot_teach(args, config):
    """For `refuse`: what is wrong with the flags or with a teacher of this config."""
    yield set(args.swap.split(',')) - set(ATTENTIONS), (
        f'--swap={args.swap}: choose from {", ".join(ATTENTIONS)}')
    yield not can_become_an_rnn(config.every_rule()), (
        f'{args.from_}: its layers are {briefly(config.every_rule())}; a teacher has softmax layers, and no '
        'other cache: python train.py --rule=softmax --n_head=4 --out=out/softmax makes one')
    yield files.lies_in(args.from_, args.out), f'--out={args.out}: it holds the teacher; take another folder'
    layers = config.rules.count('softmax')
    yield args.keep and args.keep >= layers, (
        f'--keep={args.keep}: expected fewer than the {layers} softmax layers')
    yield args.row > config.block_size, (
        f'--row={args.row}: the teacher was trained on rows of {config.block_size}; give at most that')


def untrained_student(args, changes, teacher, data):
    """The student before training -> student, names of its new parameters. With --keep, `changes` get a rule
    for each layer."""
    many = math.ceil(BEGIN / data.T)
    begin = np.concatenate([data.starts(step) for step in range(0, many, args.batch_size)])[:many]
    x, _ = data.rows(data.train, begin)
    places = args.swap.split(',')
    student, new = swap(teacher, changes, places)
    if args.keep:
        old = [i for i, rule in enumerate(teacher.config.rules) if rule == 'softmax']
        kept = [old[(2 * i + 1) * len(old) // (2 * args.keep)] for i in range(args.keep)]
        rules = enumerate(student.config.rules)
        changes['layers'] = ','.join('softmax' if i in kept else rule for i, rule in rules)
        student, new = swap(teacher, changes, places)
    config = student.config
    refuse(student.cannot_train(data.meta, args.data, args.steps))
    if any(RULES[rule].bounded for rule in config.rules) and config.cache >= data.T:
        raise ValueError(f'--cache={config.cache}: rows of {data.T} tokens never leave the cache, so nothing '
                         'would be learned; take a smaller --cache, or a longer --row')
    refuse(idle({**changes, 'layers': ''}, config))         # --layers and --rule may both be given here
    if new and is_large(teacher):                           # then it takes a minute
        say(f'new parameters begin by how the teacher looks at {x.numel():,} tokens')
    if new:
        begin_as(teacher, student, x, data.padding)
    return student, new


def rows_for_teacher(args, meta, device):
    """-> the rows to train on and to judge by, and what the data is called"""
    like = dataclasses.replace(meta['data'], most=args.row)
    *sides, of_data, name = prepare.for_model(args.from_, {**meta, 'data': like}, args.data, args.row)
    classes = meta['data'].classes
    if 0 < classes < of_data.classes:
        raise ValueError(f'--data={name}: {of_data.classes} classes, but {args.from_} knows {classes}')
    T = of_data.row or args.row
    whole = args.batch_size * T * of_data.vocab_size <= logits_at_once(device)
    parts = 1 if whole else args.batch_size                 # all rows of a step at once, or one by one
    return rows_of(*sides, of_data, T, device, args.batch_size // parts, args.seed, parts,
                   dtype=getattr(torch, args.dtype)), name


def both_stages(run, teacher, student, new, kind, distilled):
    """Stages 1 and 2, a line of the table after each -> what `compared` says: lines, one query"""
    args = run.args
    texts = run.judge.texts()
    run.judge.add_line('swapped', student)
    layers, query = compared('swapped', teacher, student, texts)
    # stage 1: each layer imitates the teacher's
    if distilled:
        names = new
        if kind == 'hidden':
            mixers = tuple(f'{name}.' for name in mixers_with(student, new))
            names = {name for name, _ in student.named_parameters() if name.startswith(mixers)}
        distil(run, teacher, student, names, kind, distilled, args.distil_lr)
        run.judge.add_line(f'distilled ({kind})', student, distilled)
        again, seen = compared('distilled', teacher, student, texts)
        layers += again
        query |= seen
    # stage 2: all weights, or LoRA's
    if args.steps:
        guide = teacher if args.loss == 'kl' else None
        unshare(student, new if args.lora else dict(student.named_parameters()))
        finetune(run, 'fine-tune', student, args.steps, args.lr, distilled, guide, args.lora, new)
        run.judge.add_line('fine-tuned', student, distilled + args.steps)
    return layers, query


@script
def main(argv):
    # the flags, and the teacher
    given, changes = flags_of(argv)
    args = Args(**given)
    device = pick_device(args.device)
    teacher, meta = load(args.from_, device)
    if args.export:
        to_folder(args.export, teacher.state_dict(), whole_config(teacher.config), meta['data'])
        say(f'{args.export}: transformers reads this folder, and so does --from')
        return
    if not args.resume:
        given, changes = by_recipe(given, changes, teacher)
        args = Args(**given)
    refuse(cannot_teach(args, teacher.config))
    take_threads(args.threads, device, functools.partial(teacher.first_layer, 1, 128))
    args.threads = torch.get_num_threads()                  # the last bits depend on it; --resume keeps it

    # the student, before training
    beside = list(models_beside(args.beside, args.from_, meta['data'], device))
    data, name = rows_for_teacher(args, meta, device)
    torch.manual_seed(args.seed)
    student, new = untrained_student(args, changes, teacher, data)
    if args.fold:
        can_fold(student)
    kind = what_to_match(args.distil, student, new)
    distilled = args.distil_steps if kind != 'none' else 0  # batches of stage 1

    # the table begins: the teacher, and what the student is compared with
    made_from = {'teacher': weights_digest(teacher, meta), 'data': data.meta.train['sha256']}
    run = Conversion(args, teacher, data, {
        'args': dataclasses.asdict(args), 'changes': changes, 'made_from': made_from, 'data': meta['data']})
    judge = run.judge
    run.tell_start(name, student, new)
    judge.add_line('teacher', teacher)
    for rival, model in rivals_of(teacher, student, beside):
        judge.add_line(rival, model)
    rivals = list(judge.by_row)[1:]                         # but for the teacher

    # train and save
    layers, query = both_stages(run, teacher, student, new, kind, distilled)
    over_best = judge.beside_the_best(rivals)
    figures = {**judge.lines[-1], 'commit': commit(), **dataclasses.asdict(args)}
    figures['before'] = judge.lines[-2].get('accuracy')     # the last stage
    unfolded = type(student), student.config
    if args.fold:
        student = fold(student)
    save(f'{args.out}/ckpt.safetensors', student,
         {'step': args.steps, 'data': meta['data'], 'args': {'data': name}, 'from': args.from_})
    files.write_json(f'{args.out}/result.json', {**figures, **dataclasses.asdict(student.config)})

    # judge beyond the rows and the policy of the training, and beside the controls
    one_text = {source: judge.in_one_text(source, model) for source, model in [(args.out, student), *beside]}
    for form, model in under_policies('the same', student).items():
        if model is not student:
            judge.add_line(form, model, distilled + args.steps)
    if args.controls and args.steps:
        controls(run, teacher, *unfolded, distilled + args.steps)

    # report
    print()
    table(judge.lines)
    print()
    files.write_json(f'{args.out}/convert.json', {
        'args': dataclasses.asdict(args), 'config': dataclasses.asdict(student.config), 'distil': kind,
        'table': judge.lines, 'layers': layers, 'query': query, 'in one text': one_text,
        'over the best other': over_best})
    print(f'{args.out}/convert.json has this table; {next_command(args.out, meta["data"])}')
    forget(args.out)


if __name__ == '__main__':
    sys.exit(main())
