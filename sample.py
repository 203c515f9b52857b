"""Write text with a trained model: the prompt is read in chunks, then one step a token, in constant memory.

    python sample.py                                          256 tokens from out/ckpt.safetensors
    python sample.py --prompt="def main():" --tokens=1000 --temperature=0.7 --top_p=0.95
    cat model.py | python sample.py --prompt=- --save_state=out/read.safetensors     read once ...
    python sample.py --load_state=out/read.safetensors --prompt="class "             ... and go on from there
    python sample.py --rule=tova --cache=64          a softmax model as an RNN with 64 rows, without training
"""
import dataclasses
import itertools
import sys
import time
from dataclasses import dataclass

import torch

from convert import pretrained
from data import prepare
from model import Swap, flag, pack, parse, pick_device, pick_form, read, script, state_bytes, unpack, write


@dataclass
class Args:
    init: str = flag('out/ckpt.safetensors', 'checkpoint, or gpt2, OWNER/NAME, a folder, as for convert.py')
    prompt: str = flag('', 'text, @file, or - for standard input; empty starts from a newline')
    tokens: int = flag(256, 'tokens to write', low=0)
    samples: int = flag(1, 'texts written at once', low=1)
    temperature: float = flag(0.8, '0 takes the likeliest token', low=0)
    top_k: int = flag(0, 'only the k likeliest tokens; 0 for all', low=0)
    top_p: float = flag(1.0, 'only the likeliest tokens of this probability together', low=1e-6, high=1)
    seed: int = flag(0, 'of the draws', low=0, high=2 ** 32 - 1)
    save_state: str = flag('', 'file for the state after prompt and sample')
    load_state: str = flag('', 'go on from this state')
    device: str = flag('auto', 'auto, cpu, cuda, mps')
    impl: str = flag('auto', 'form of the recurrence', ['auto', 'loop', 'chunk', 'fused'])


def read_prompt(text):
    if text == '-':
        return sys.stdin.read()
    if text.startswith('@'):
        with open(text[1:], encoding='utf-8') as f:
            return f.read()
    return text


@script
def main(argv):
    given, swap = parse(argv, __doc__, Args, Swap)
    args = Args(**given)
    device = pick_device(args.device)
    model, meta = pretrained(args.init, device=device, **swap)
    if 'data' not in meta:
        raise ValueError(f'{args.init}: says nothing of its tokenizer, so it was not written by train.py')
    model.eval()
    model.form, why = pick_form(args.impl)
    generator = torch.Generator(device).manual_seed(args.seed)

    name = meta.get('digest', args.init)             # of the model, for states
    tokens, state = prepare.encode(read_prompt(args.prompt), meta['data']), None
    tokens = torch.tensor([tokens] * args.samples, dtype=torch.long, device=device)
    if args.load_state:                              # a state never includes the last token: read it first
        kept, about = read(args.load_state)
        if about.get('model') != name:
            raise ValueError(f'--load_state={args.load_state}: not a state of the model in {args.init}')
        here = dataclasses.asdict(model.config)
        if other := [f'{n}={x}' for n, x in about.get('made_with', {}).items() if here.get(n) != x]:
            raise ValueError(f'--load_state={args.load_state}: made with {", ".join(other)}; give that, too')
        if len(kept['last']) != args.samples:
            n = len(kept['last'])
            raise ValueError(f'--load_state={args.load_state} holds {n} texts: take --samples={n}')
        tokens, state = torch.cat([kept['last'].to(device), tokens], 1), unpack(kept, device=device)
    elif not tokens.numel():
        tokens = torch.tensor([prepare.first(meta['data'])] * args.samples, device=device)
    say = lambda text: print(text, file=sys.stderr)  # standard output is the text, and nothing else
    say(f'{",".join(model.config.rules())} from {args.init}, step {meta["step"]}; {why}')
    end = (state[0]['t'] if state else 0) + tokens.shape[1] + args.tokens
    if model.positions is not None and end > model.config.block_size:
        say(f'past {model.config.block_size} tokens, the last learned position is repeated')

    began = time.perf_counter()
    state, last = model.read(tokens[:, :-1], state), tokens[:, -1:]
    n, tenth = args.tokens, max(1, args.tokens // 10)
    clock, out = {0: time.perf_counter()}, []        # at the tenths; tokens not yet printed
    texts = model.generate(last, state, args.temperature, args.top_k, args.top_p, generator)
    for i, (last, state) in enumerate(itertools.islice(texts, n), 1):
        out.append(last)
        if args.samples == 1:                        # as it comes, but for bytes of an unfinished character
            text = prepare.decode([t.item() for t in out], meta['data'])
            if not text.endswith('\ufffd') or len(out) > 3 or i == n:
                print(text, end=' ' if meta['data']['tokenizer'] == 'ids' else '', flush=True)
                out.clear()
        if i in (tenth, n - tenth, n):
            clock[i] = time.perf_counter()
    if args.samples > 1:
        for i, row in enumerate(torch.cat(out, 1).tolist() if out else ()):
            print(f'--- {i + 1} ---\n{prepare.decode(row, meta["data"])}')
    print(flush=True)
    if args.save_state:
        write(args.save_state, {**pack(state or []), 'last': last},
              {'model': name, 'made_with': dataclasses.asdict(model.config)})
    pace = lambda i, j: 1e3 * (clock[j] - clock[i]) / max(1, j - i)
    speed = '' if not n else (
        f', {1e3 * args.samples / max(pace(0, n), 1e-9):,.0f} tokens/s: {pace(0, n):.2f} ms a step, '
        f'first tenth {pace(0, min(tenth, n)):.2f}, last {pace(max(0, n - tenth), n):.2f}')
    say(f'{tokens.shape[1]:,} tokens read in {clock[0] - began:.2f} s, {n:,} written{speed}; '
        f'state of {state_bytes(state):,} bytes, '
        f'{"growing" if "all" in model.config.keeps() else "whatever the length"}')


if __name__ == '__main__':
    sys.exit(main())
