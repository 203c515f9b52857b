"""A translator: an encoder reads the source, a decoder with cross attention writes the translation.

    Translator(TranslatorConfig(encoder=3, source=64, pad=0))   # rows: source, then what the decoder reads

Vaswani 2017 (arXiv:1706.03762) with softmax, Kasai 2021 and Schlag 2021 with fast weights. A source is
written once, into S or a cache, and each step of the decoder reads that.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.flags import flag, known
from common.weights import chosen_texts
from fastweight import RULES
from model import GPT, Block, Config, check_tokens
from models.encoder import EncoderBlock, WholeMixer, not_padding, unreadable


class SourceRules:
    """The rules that see a whole text, whenever one asks: you may enter more into RULES."""
    def __iter__(self):
        return (name for name, rule in RULES.items() if not rule.bounded)


SOURCE_RULES = SourceRules()


@dataclass
class TranslatorConfig(Config):
    """A Config whose layers are those of the decoder"""
    encoder: int = flag(3, 'layers of an encoder for the source (data of pairs); n_layer then counts '
                           'those of the decoder', low=1, high=1024)
    encoder_rule: str = flag('', 'rule of the encoder, if not --rule; for caches softmax', SOURCE_RULES)
    cross: str = flag('', 'rule of the cross attention to the source, if not --rule; for caches softmax',
                     SOURCE_RULES)
    pad: int = known(None, 0, 2 ** 32)      # the token that marks padding
    source: int = known(0, 0, 2 ** 24)      # length of the source, which begins each row

    def __post_init__(self):
        if self.pos == 'auto':
            self.pos = 'learned'
        super().__post_init__()

    def every_rule(self):
        return self.rules + self.source_rules

    @property
    def source_rules(self):
        """The rules of the encoder and of the cross attention"""
        first = 'softmax' if RULES[self.rules[0]].bounded else self.rules[0]        # a source is read whole
        return [self.encoder_rule or first, self.cross or first]

    def contradictions(self):
        yield from super().contradictions()
        yield from unreadable(self.source_rules, self.phi, self.norm)


class Cross(WholeMixer):
    """Cross attention: queries come from the decoder, keys and values from the encoder."""
    def __init__(self, c, rule):
        super().__init__(c, rule)
        self.rope = False                           # positions in two texts have no distance

    def write(self, x, real=None):
        """x (B, T, n_embd), real (B, T) -> its state: what `forward` reads at each step"""
        _, k, v = self.project(x)
        return self.memory.write_all(x, k, v, real)

    def forward(self, x, state, t):
        """x (B, T, n_embd), t the position of the first step -> what it finds in the source, like x"""
        q, _, _ = self.project(x)
        o = self.memory.read_all(q, state, t)
        return self.dropout(self.proj(self.merge(o)))


class DecoderBlock(Block):
    """A Block with x + cross(norm(x)) between its two branches"""
    def add_mlp(self, c):
        self.norm3 = c.layer_norm()
        self.cross = Cross(c, c.source_rules[1])
        super().add_mlp(c)

    def forward(self, x, state, t=0):
        state = {**state}
        x = x + self.mix(self.norm1(x), state, t)
        x = x + self.cross(self.norm3(x), state['cross'], t)
        x = x + self.mlp(self.norm2(x), state)
        return x, state


class Translator(GPT):
    """tokens (B, T): a row begins with config.source tokens for the encoder. Logits are those of the others,
    (B, T - source, vocab). In a state, cross has S, or k, v, real of the source."""
    config_class = TranslatorConfig
    block_class = DecoderBlock
    task = 'translate'

    def __init__(self, config):
        if not config.source or config.pad is None:
            raise ValueError(f'--encoder={config.encoder}: an encoder reads the first part of a pair; give '
                             'data with pairs, such as multi30k (in Python: source and pad)')
        super().__init__(config)

    def add_input(self, c):
        super().add_input(c)
        self.encoder = nn.ModuleList(EncoderBlock(c, c.source_rules[0]) for _ in range(c.encoder))
        self.encoder_norm = c.layer_norm()

    def first_std(self, name, n):
        if name.startswith('encoder.') and name.endswith(('mixer.proj.weight', 'down.weight')):
            return n ** -0.5 / (2 * self.config.encoder) ** 0.5
        if name.endswith('cross.proj.weight'):
            return n ** -0.5 / (2 * self.config.n_layer) ** 0.5
        return super().first_std(name, n)

    def hidden(self, tokens, state=None):
        check_tokens(tokens)
        if state is None:                           # the source stands first
            n = self.config.source
            state = self.read_source(tokens[:, :n])
            tokens = tokens[:, n:]
        if not tokens.shape[1]:                     # only a source, no decoder text yet
            return self.embed(tokens), state
        t = state['t']
        x = self.embedded(tokens, t)
        layers = []
        for block, layer in zip(self.blocks, state['layers']):      # count the decoder's own tokens
            x, layer = block(x, layer, t - self.config.source)
            layers.append(layer)
        return self.norm(x), {'t': t + x.shape[1], 'layers': layers}

    def forward(self, tokens, state=None, at=None):
        x, state = self.hidden(tokens, state)
        if at is not None:
            x = x[at[:, at.shape[1] - x.shape[1]:]]         # x has only the decoder's part
        return self.logits(x), state

    def read_source(self, tokens):
        """Read a source, tokens (B, T) with padding at the end, T <= config.source -> the state with which
        the decoder begins. Each of its layers writes the encoder's output into its state."""
        if tokens.shape[1] > self.config.source:
            raise ValueError(f'a source of {tokens.shape[1]} tokens, this model reads {self.config.source}')
        tokens, real = self.without_padding(tokens)
        x = self.embedded(tokens)
        for block in self.encoder:
            x = block(x, real)
        x = self.encoder_norm(x)
        t = torch.tensor(self.config.source)        # position in the row, padding included
        return {'t': t, 'layers': [{'cross': block.cross.write(x, real)} for block in self.blocks]}

    def without_padding(self, tokens, begins=False):
        """Cut tokens (B, T) at the end of the longest text -> tokens, and which of them are not padding.
        begins: the first token is not padding either, as in a translation."""
        real = not_padding(tokens, self.config.pad)
        real[:, 0] |= begins
        longest = real.sum(1).max()
        return tokens[:, :longest], real[:, :longest]

    @torch.no_grad()
    def read(self, tokens, state=None, segment=2048, label=''):
        segment = max(segment, self.config.source)                  # a source is read whole
        return super().read(tokens, state, segment, label)

    @torch.no_grad()
    def first_layer(self, B, T):
        self.encoder[0](self.embed.weight.new_zeros(B, T, self.config.n_embd))

    def cannot_train(self, data, name, steps):
        yield not data.source, f'--encoder={self.config.encoder}: give data with pairs, such as multi30k'

    @torch.inference_mode()
    def translate(self, tokens, beam=1, penalty=0.6):
        """Translate sources, tokens (B, T) -> tokens (B, n), padded at the end, where n is at most what fits
        into a row. Beam search follows the `beam` likeliest texts per source. Once as many have ended, it
        returns the one with the largest log p / ((5 + n) / 6)^penalty (Vaswani 2017 sec. 6.1, Wu 2016
        arXiv:1609.08144 eq. 14). A beam of 1 is greedy."""
        pad = self.config.pad
        B = len(tokens)
        first = beam * torch.arange(B, device=tokens.device)[:, None]       # first text of each source
        texts_of_sources = torch.arange(B).repeat_interleave(beam)
        state = chosen_texts(self.read_source(tokens), texts_of_sources)
        token = tokens.new_full((B * beam, 1), pad)
        texts = tokens.new_empty(B, beam, 0)
        scores = torch.full((B, beam), -math.inf, device=tokens.device)
        best = texts[:, :1]                                 # best finished text, and its score
        best_score = scores[:, :1].clone()
        scores[:, 0] = 0                                    # all texts begin alike, so follow only one
        most = self.config.block_size - self.config.source
        ends = 0                                            # (B, 1): how many texts have ended
        for n in range(1, most + 1):
            logits, state = self(token, state)
            log_p = logits[:, -1].float().log_softmax(-1).view(B, beam, -1)
            scores, index = (scores[..., None] + log_p).flatten(1).topk(beam)
            parent = index // log_p.shape[-1]
            chosen = index % log_p.shape[-1]
            texts = torch.cat([texts.take_along_dim(parent[..., None], 1), chosen[..., None]], 2)
            ended = (chosen == pad) | (n == most)           # at the last step, all end
            final = (scores / ((5 + n) / 6) ** penalty).masked_fill(~ended, -math.inf)
            best_score, i = torch.cat([best_score, final], 1).max(1, keepdim=True)
            best = F.pad(best, (0, 1), value=pad)
            best = torch.cat([best, texts], 1).take_along_dim(i[..., None], 1)
            ends += final.isfinite().sum(1, keepdim=True)
            if (ends >= beam).all():
                break
            scores = scores.masked_fill(ended | (ends >= beam), -math.inf)
            # texts of one source share what cross attention has of it
            state = chosen_texts(state, (first + parent).flatten(), shared=('cross',))
            token = chosen.view(-1, 1)
        return best[:, 0]
