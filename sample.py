"""Write text with a trained model: read the prompt in chunks, then take one step per token.

    python sample.py                                          256 tokens from out/ckpt.safetensors
    python sample.py --prompt="def main():" --tokens=1000 --temperature=0.7 --top_p=0.95
    cat model.py | python sample.py --prompt=- --save_state=out/read.safetensors     read once ...
    python sample.py --load_state=out/read.safetensors --prompt="class "             ... and go on from there
    python sample.py --init=FOLDER --chat --rule=h2o --cache=256           a conversation in constant memory
    python sample.py --init=out/softmax/ckpt.safetensors --rule=tova --cache=64      an RNN without training
    python sample.py --prompt=@FILE --lines                    of a classifier: the class of each line
    python sample.py --source="A man sleeps." --beam=4         a translation; @file: one of each line

If the model is a classifier, the prompt is classified: each class is printed with its probability. In a chat
(--chat) the model's own template frames what is said: --prompt, and each line of standard input if that is a
terminal or there is no --prompt. /help says what else can be typed. A text also ends where the model ends it.

What is written goes to standard output without the prompt: several texts below headings, translations one a
line. Messages go to standard error.

A state is everything that a model keeps of what it has read: for each layer a matrix S of fast weights, or
keys and values, and the last inputs of the convolutions. It does not grow with the text, except with softmax.
"""
import functools
import sys
import time
from dataclasses import dataclass

from common.errors import aside, note, script      # before torch: common/__init__.py
import torch

import models
from common import files
from common.checks import idle
from common.flags import flag, parse, plural, refuse
from common.machine import pick_device, take_threads
from common.weights import chosen_texts, state_bytes
from data import vocabulary
from data.vocabulary import LOOK_BACK, added
from memory import pick_forms
from model import load
from models.files import overflow_of
from runs import answers, states
from runs.states import keep_state, read_state

OFTEN = 'init prompt chat tokens temperature top_p rule cache dtype html'      # first in --help


@dataclass
class Args(states.Flags, answers.Flags):
    init: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2; OWNER/NAME; a folder', path=True)
    prompt: str = flag('', 'text, @file, - for standard input; empty: BOS, or a newline')
    chat: bool = flag(False, 'a conversation, in the chat template that the model brought')
    system: str = flag('', 'with --chat: a system prompt, or @file')
    special: bool = flag(False, 'read special tokens in --prompt, such as <|im_end|>, not their letters')
    tokens: int = flag(256, 'tokens to write; of each answer', low=0, high=10 ** 12)
    samples: int = flag(1, 'texts written at once; of --load_state as many as it has', low=1, high=2 ** 16)
    temperature: float = flag(0.8, '0, or less than 1e-4, takes the likeliest token', low=0, high=100)
    top_k: int = flag(0, 'only the k likeliest tokens; 0 for all', low=0, high=2 ** 32)
    top_p: float = flag(1.0, 'only the likeliest tokens, whose probabilities add up to this', low=1e-6,
                        high=1)
    seed: int = flag(0, 'seed of the draws', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda, mps')
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)
    dtype: str = flag('float32', 'of the weights', ['float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence', ['auto', 'loop', 'chunk', 'fused'])
    html: str = flag('', 'NAME.html: a page that shows what each memory kept of this text', path=True)


def prompt_and_state(args, model, meta):
    """-> the tokens to read (B, T), the state before them, and the tokens that the first text begins with"""
    data = meta['data']
    text = files.text_of(args.prompt)
    for word in data.special:
        if word in text and not args.special:
            note(f'{word} in --prompt is read as letters; --special reads it as a token')
            break
    if args.load_state:
        last, state = read_state(args, model, meta)
        prompt = vocabulary.continued(text, last[0].tolist(), data, args.special)   # the others go on alike
        texts = [before + prompt for before in last.tolist()]
        prompt = texts[0]
    else:
        state = None
        prompt = vocabulary.encode(text, data, args.special)
        texts = [vocabulary.with_bos(prompt, data)] * args.samples
    vocabulary.tell_lost(texts[0], data)
    return torch.tensor(texts, device=model.embed.weight.device), state, prompt


def show_text(before, held, data):
    """Print the held tokens once they end with a whole character, which may take four of them, as bytes, or
    after LOOK_BACK: an untrained model writes bytes that never become a character.
    -> the printed tokens that matter to the next ones; the tokens that wait for more"""
    text = added(before, held, data)
    if text.endswith('\ufffd') and len(held) < LOOK_BACK:
        return before, held
    print(text, end='', flush=True)
    return held, []


def write_texts(args, model, data, first, state, prompt=None):
    """Write what comes after the tokens `first` (B, 1) and the state before them. A text ends with a token
    that ends texts, which does not count. prompt: the tokens before, if the one text is printed as it comes
    -> the last tokens, their state, the tokens of each text, the number of steps, the seconds they took"""
    ends = data.ends
    if args.save_state and len(first) > 1:                  # in the state, no text stops before the others
        ends = []
    before = (prompt or [])[-LOOK_BACK:]                    # tokens that were printed, or given
    held = []                                               # those of an unfinished character
    texts = [[] for _ in first]
    ended = [False] * len(texts)
    last = first
    draw = torch.Generator(first.device).manual_seed(args.seed)
    steps = model.generate(first, state, args.temperature, args.top_k, args.top_p, draw)
    began = time.perf_counter()
    done = 0
    try:
        for _ in range(args.tokens):
            last, state = next(steps)
            for i, token in enumerate(last[:, 0].tolist()):     # which waits for a GPU
                ended[i] = ended[i] or token in ends
                if not ended[i]:
                    texts[i].append(token)
            done += 1
            if all(ended):
                break
            if prompt is not None:
                before, held = show_text(before, held + [token], data)
    except KeyboardInterrupt:
        if not (args.chat and sys.stdin.isatty()):          # then someone may go on with the chat
            raise
    seconds = time.perf_counter() - began
    if prompt is not None:
        print(added(before, held, data), flush=True)
    return last, state, texts, done, seconds


def tell_if_past(c, before, now):
    """Say what happens beyond the positions that a model knows, once a text of `before` tokens has `now`.
    c: its Config"""
    if not before <= c.block_size < now:
        return
    near = c.sees_near_alone() and c.cache <= c.block_size
    if c.pos == 'learned':
        aside(f'past {c.block_size:,} tokens, the last learned position is repeated')
    elif c.has_rope() and not near:
        aside(f'past {c.block_size:,} tokens, rope meets distances that it did not meet in training')


def converse(args, model, meta):
    """A conversation and, however it ends, its page and what it took. At a terminal, Ctrl-C ends an answer,
    which stays in the conversation as far as it is written."""
    from runs import talk
    data = meta['data']
    chat = talk.Talk(talk.system_prompt(args, data), data)
    steps = 0
    seconds = 0.0
    try:
        for said in talk.spoken(args.prompt):
            if said == '/reset':
                chat.reset()
                continue
            before = len(chat.heard)
            ids = chat.ask(said)
            tell_if_past(model.config, before, len(chat.heard))
            tokens = torch.tensor([ids], device=model.embed.weight.device)
            last = tokens[:, -1:]
            written = []
            try:
                chat.state = model.read(tokens[:, :-1], chat.state, label='reading')
                last, chat.state, [written], n, took = write_texts(args, model, data, last, chat.state, ids)
                steps += n
                seconds += took
            except KeyboardInterrupt:                       # while it read
                if not sys.stdin.isatty():
                    raise
            if len(written) == args.tokens:
                aside(f'(cut off; --tokens={args.tokens} is the most that an answer may have)')
            elif last.item() not in data.ends:
                aside('(cut off)')
            tell_if_past(model.config, len(chat.heard), len(chat.heard) + len(written))
            chat.answer(written)
    finally:
        if args.html and chat.heard:
            from look import page
            page.write_page(args, model, meta, chat.heard)
        if chat.state:
            speed = f', {steps / seconds:,.1f} tokens/s in answers' if steps else ''
            aside(f'{plural(chat.read, "token")} read and written{speed}; '
                  f'state of {state_bytes(chat.state):,} bytes')


def complete(args, model, meta):
    """Read the prompt, write what comes after it, keep the state, and say how long it took."""
    c = model.config
    tokens, state, prompt = prompt_and_state(args, model, meta)
    read = tokens.shape[1]
    if args.save_state and state is None and read == 1 and not args.tokens:
        raise ValueError('--save_state --tokens=0: nothing is read yet, as the next step reads a last token; '
                         'give a longer --prompt, or more --tokens')
    aside(f'{c.summary()} from {args.init}; recurrence: {model.why}')
    tell_if_past(c, 0, read + args.tokens + (int(state['t']) if state else 0))
    began = time.perf_counter()
    if args.load_state:
        state = model.read(tokens[:, :-1], state, label='reading')
    elif read > 1:                                          # all texts begin alike: that is read once
        state = model.read(tokens[:1, :-1], state, label='reading')
        state = chosen_texts(state, torch.zeros(args.samples, dtype=torch.long))
    alone = prompt if len(tokens) == 1 else None
    reading = time.perf_counter() - began
    last, state, texts, steps, seconds = write_texts(args, model, meta['data'], tokens[:, -1:], state, alone)
    if len(texts) > 1 and args.tokens:
        for i, text in enumerate(texts, 1):
            print(f'--- {i} ---\n{added(prompt[-LOOK_BACK:], text, meta["data"])}')
    if args.save_state:
        keep_state(args, model, meta, last, state)
    if args.html:
        from look import page
        page.write_page(args, model, meta, page.by_whom(tokens[0].tolist(), texts[0]))
    speed = ''
    if steps:
        speed = f', {steps * len(texts) / seconds:,.0f} tokens/s'
    else:
        read -= 1                                           # the last one waits for a step
    growth = 'growing' if 'all' in c.keeps() else 'whatever the length'
    aside(f'{plural(read, "token")} read in {reading:.2f} s, {steps:,} written{speed}; '
        f'state of {state_bytes(state):,} bytes, {growth}')


DO = {'translate': answers.show_translations, 'classify': answers.classify, 'chat': converse,
      'complete': complete}


@script
def main(argv):
    given, *swap = parse(argv, __doc__, Args, models.cache_flags(), first=OFTEN, more=models.hybrid_flags)
    swap = models.merged(swap)
    args = Args(**given)
    device = pick_device(args.device)
    model, meta = load(args.init, device, dtype=getattr(torch, args.dtype), **swap)
    c = model.config
    refuse(idle(swap, c))
    task = answers.task_of(args, model)
    refuse(answers.useless(task, given, args))
    if args.html:
        from look import page
        refuse(page.cannot_be_shown(args, c))
    for path in filter(None, (args.save_state, args.html)):
        files.make_room(path)                               # fails now, not after sampling
    refuse(states.cannot_be_kept(args.save_state))
    overflow = overflow_of(c)
    if overflow and overflow != meta['config'].get('overflow'):
        aside(f'--overflow={overflow}: untrained, new weights; convert.py --recipe=hybrid trains some')
    model.use(pick_forms(args.impl))
    take_threads(args.threads, device, functools.partial(model.first_layer, 1, 1))
    DO[task](args, model, meta)


if __name__ == '__main__':
    sys.exit(main())
