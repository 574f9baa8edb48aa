"""Parts of which random blocks are made: a few lines each, which read ``h`` and may give it another value.

In their lines ``$`` stands for a number of the part's own, ``@`` for the path of its block from where the training
loop is, and one of the words of ``{a|b}`` is drawn. ``h`` has ``R`` rows of ``D`` columns before and after each part,
so that any of them can be left out.
"""

from __future__ import annotations

from dataclasses import dataclass

RARE, USUAL, OFTEN = 1, 2, 4


@dataclass(frozen=True)
class Part:
    """A few lines of a block, and what the model and the training loop around it do for them.

    Args:
        name: of its kind; several parts may share it.
        forward: lines of the block's ``forward``.
        init: lines of the block's ``__init__``.
        before_step: lines at the start of a step.
        before_call: lines of the model right before each call of the block.
        between: lines after forward and before backward.
        after_step: lines after the optimizer's step.
        around: a context manager around the forward of the whole model.
        weight: how often it is drawn.
    """

    name: str
    forward: str
    init: str = ""
    before_step: str = ""
    before_call: str = ""
    between: str = ""
    after_step: str = ""
    around: str = ""
    weight: int = USUAL


LAYERS = [
    Part("linear", "h = self.l$(h)", "self.l$ = nn.Linear(D, D)", weight=OFTEN * 2),
    Part("linear", "h = h + self.l$(torch.{tanh|relu|sigmoid}(h))", "self.l$ = nn.Linear(D, D, bias=False)"),
    Part("linear", "h = h @ self.w$", "self.w$ = nn.Parameter(torch.randn(D, D) / D**0.5)"),
    Part("norm", "h = self.n$(h)", "self.n$ = nn.{LayerNorm(D)|GroupNorm(2, D)|RMSNorm(D)}", weight=OFTEN),
    Part("batch norm", "h = self.n$(h)", "self.n$ = nn.BatchNorm1d(D, momentum={0.1|None})", weight=OFTEN),
    Part("convolution", "h = self.c$(h[:, None]).mean(1)", "self.c$ = nn.Conv1d(1, 4, 3, padding=1)", weight=OFTEN),
    Part(
        "attention",
        "q = self.q$(h).view(R, 3, 2, -1).permute(1, 2, 0, 3)\n"
        "h = h + F.scaled_dot_product_attention(q[0], q[1], q[2], is_causal={True|False})"
        ".transpose(0, 1).reshape(R, D)",
        "self.q$ = nn.Linear(D, 3 * D)",
    ),
    Part("mlp", "h = h + self.m$(h)", "self.m$ = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))"),
    Part("rnn", "h = self.r$(h[:, None])[0][:, 0]", "self.r$ = nn.{GRU|RNN}(D, D)"),
    Part("lstm", "h = self.r$(h[:, None])[0][:, 0]", "self.r$ = nn.LSTM(D, D)", weight=RARE),
    Part("embedding", "h = h + self.e$(h.argmax(-1))", "self.e$ = nn.Embedding(D, D)"),
    Part("weight norm", "h = self.p$(h)", "self.p$ = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))"),
    Part("spectral norm", "h = self.p$(h)", "self.p$ = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))"),
    Part(
        "functional call",
        "h = torch.func.functional_call(self.l$, {'weight': self.l$.weight * 0.5, 'bias': self.l$.bias}, (h,))",
        "self.l$ = nn.Linear(D, D)",
    ),
]

VALUES = [
    Part("pointwise", "h = torch.{tanh|sin|cos|sigmoid|relu|erf|neg|sinh|atan|exp|log1p}(h.clamp(-0.9, 3.0))"),
    Part("pointwise", "h = F.{gelu|silu|softplus|elu|hardtanh|leaky_relu|logsigmoid|mish|softsign|relu6}(h)"),
    Part("even", "h = {h.abs()|h * h|h.square()|h.cos()|h.cosh().log()|h.pow(4)}", weight=OFTEN),
    Part("even", "h = F.pad(torch.cdist(h, h), (0, D))[:, :D]"),
    Part("even", "h = {h @ h.T @ h / D|torch.cdist(h, h) @ h / D|h.norm(dim=-1, keepdim=True) * h / D}"),
    Part("softmax", "h = F.{softmax|log_softmax|normalize}(h, dim={0|1})"),
    Part("reduction", "h = h - h.{mean|amax|logsumexp}(dim={0|1}, keepdim=True)"),
    Part("reduction", "h = h / (h.{std|var}(dim={0|1}, keepdim=True) + 1)"),
    Part("gate", "h = h * torch.sigmoid(h{|.flip(0)|.mean(0)|.roll(1, 1)})"),
    Part("scan", "h = {h.cumsum(0)|h.logcumsumexp(1)|h.cummax(0).values|h.sort(1).values|h.flip(1)} / 2"),
    Part("view", "h = {h.T.contiguous().T|h.view(R, 2, -1).flip(1).reshape(R, D)|h.as_strided((R, D), (1, R))}"),
    Part("view", "h = {torch.cat(h.chunk(2, 1)[::-1], 1)|torch.stack(h.unbind(1)[::-1], 1)|h[:, ::2].repeat(1, 2)}"),
    Part("view", "h = {h[:1].expand(R, D) + h|h.unfold(0, 2, 1).sum(-1).mean(0) + h|h.t().t().unsqueeze(0)[0]}"),
    Part("index", "h = h + h[{h.argmax(0)[:1].clamp(max=R - 1)|h[:, 0].argsort()|torch.arange(R - 1, -1, -1)}]"),
    Part("index", "h = h.{gather(1, h.argsort(1))|take_along_dim(h.argsort(0), 0)|index_select(0, h[:, 0].argsort())}"),
    Part("index", "h = h.index_add(0, h.argsort(0)[:, 0], h.tanh())"),
    Part("mask", "h = {torch.where(h > 0, h, h.sin())|h.masked_fill(h > 1, 0.5)|h * (h > h.mean())}"),
    Part("data-sized", "h = h + h[h[:, 0] > 0].sum(0)"),
    Part("data-sized", "h = h + h[h > 0].tanh().sum() / D"),
    Part("branch on data", "h = h.{tanh|cos|abs}() if h.sum() > 0 else h.{sin|erf|square}()"),
    Part("in place", "h = h.clone()\nh{.mul_(0.5)|[:, :2] = 0|[0].add_(1)|[:, 1].tanh_()|.relu_()}"),
    Part("in place", "h = h.clone()\nv = h{[1:]|.T|.view(-1)}\nv.{mul_(2)|sin_()|add_(1)}\nh = h + 1"),
    Part("in place", "h = torch.sin(h)\nh.{add_|mul_}(0.5)", weight=RARE),
    Part("in place", "h = h.clone().index_put_((h.argmax(0)[:1] % R,), h[:1], accumulate={True|False})"),
    Part("write of input", "h.{add_(0.5)|mul_(0.5)|relu_()}", weight=RARE),
    Part("no grad", "with torch.no_grad():\n    s = h.abs().max()\nh = h / (s + 1)"),
    Part("no grad", "h = h {+|*} h.detach().{sin|tanh|mean}()"),
    Part("inference mode", "with torch.inference_mode():\n    s = float(h.detach().abs().mean())\nh = h / (s + 1)"),
    Part(
        "inference mode",
        "with torch.inference_mode():\n    s = h.detach() @ h.detach().T\nh = h * float(s.trace().tanh())",
    ),
    Part(
        "autocast",
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    h = self.a$(h){|.relu()|.tanh() @ h.T @ h}\nh = h.to(self.a$.weight.dtype)",
        "self.a$ = nn.Linear(D, D)",
    ),
    Part("bfloat16", "h = (h.bfloat16() * 2).tanh().to(h.dtype)"),
    Part("complex", "h = torch.fft.irfft(torch.fft.rfft(h) * (1 + 0.5j), n=D)"),
    Part("sparse", "h = torch.sparse.mm(self.adjacency$, h)", "self.adjacency$ = torch.eye(R).to_sparse()"),
    Part("own function", "h = Doubled.apply(h)"),
    Part("own function", "h = Folded.apply(h, {3|2})[{0|1}]"),
    Part("own function", "h = Written.apply(h.clone())"),
    Part("own function", "h = Rounded.apply(h)"),
    Part("hook", "h = h * 1\nif h.requires_grad:\n    h.register_hook(lambda g: g * 2)"),
    Part("scripted", "h = scripted(h)"),
    Part("scripted", "h = self.t$(h)", "self.t$ = scripted_linear(D)"),
    Part("wrapper without storage", "h = h + Hollow(h.detach()).content", weight=RARE),
    Part(
        "operator on a wrapper without storage",
        "w = Hollow(h.detach()).{tanh|sin}()\nh = h * w.content",
        weight=RARE,
    ),
    Part(
        "strided nested tensor",
        "n = torch.nested.as_nested_tensor([h[:1].tanh(), h[1:] * 2])\n"
        "h = torch.cat({torch.relu(n)|(n * n)|torch.tanh(n)}.unbind())",
    ),
    Part("requires no grad", "h = h + F.max_pool1d(self.c$[None], 3, 1, 1)[0]", "self.c$ = torch.randn(R, D)"),
    Part("requires no grad", "h = h * F.max_pool1d(self.c$[None], 2).pow(2).mean()", "self.c$ = torch.randn(R, D)"),
    Part("requires no grad", "h = h * torch.linalg.{cond|svdvals}(self.c$).mean()", "self.c$ = torch.randn(D, D)"),
    Part("eigenvalues", "h = h / (1 + torch.linalg.eigvalsh(h.detach() @ h.detach().T).abs().amax())"),
    Part("nuclear norm", "h = h / (1 + torch.linalg.matrix_norm(self.c$, 'nuc'))", "self.c$ = torch.randn(D, D)"),
    Part(
        "constant",
        "h = h * torch.full((D,), 0.5) + torch.arange(D)",
    ),
    Part(
        "checkpoint of torch's", "h = checkpoint(self.l$, h, use_reentrant=False).tanh()", "self.l$ = nn.Linear(D, D)"
    ),
    Part("without data", "n = torch.empty(R, D, device='meta').{sum(0)|t()}.shape[0]\nh = h / n", weight=RARE),
    Part(
        "without data",
        "with FakeTensorMode():\n    n = torch.empty(R, D).mm(torch.empty(D, 3)).shape[1]\nh = h / n",
        weight=RARE,
    ),
]

DRAWS = [
    Part("dropout", "h = {F.dropout(h, 0.3, self.training)|F.alpha_dropout(h, 0.2, self.training)}", weight=OFTEN),
    Part("dropout", "h = self.d$(h)", "self.d$ = nn.Dropout(0.25)"),
    Part("noise", "h = h + {torch.randn_like(h)|torch.rand(R, D)|torch.bernoulli(torch.full((R, D), 0.5))} * 0.1"),
    Part("noise", "h = h[{torch.randperm(R)|torch.randint(R, (R,))|torch.multinomial(torch.ones(R), R)}]"),
    Part("rrelu", "h = F.rrelu(h, training=True)"),
    Part("branch on a draw", "h = h.tanh() if torch.rand(()) < 0.5 else h.sin()"),
    Part("layer drop", "if torch.rand(()) > 0.5:\n    h = h + self.l$(h)", "self.l$ = nn.Linear(D, D)"),
    Part("generator", "h = h * torch.rand(D, generator=self.g$)", "self.g$ = torch.Generator().manual_seed(3)"),
    Part("generator", "h = h[torch.randperm(R, generator=self.g$)]", "self.g$ = torch.Generator().manual_seed(3)"),
]

STATE = [
    Part(
        "written buffer",
        "{h = h - self.m$\n|}"
        "self.m$.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)\nh = h {- self.m$|/ (1 + self.m$.abs())|}",
        "self.register_buffer('m$', torch.zeros(D))",
    ),
    Part(
        "written buffer",
        "with torch.no_grad():\n    self.m$ += h.{sum|mean}()",
        "self.register_buffer('m$', torch.zeros(()))",
    ),
    Part(
        "replaced state",
        "self.m$ = 0.9 * self.m$ + 0.1 * h.detach().mean(0)\nh = h {- self.m$|* self.m$.cos()|}",
        "{self.register_buffer('m$', torch.zeros(D))|self.m$ = torch.zeros(D)}",
    ),
    Part(
        "replaced state",
        "s = h + self.m$\nself.m$ = torch.tanh(s).detach()\nh = {s.sin()|s * s}",
        "self.m$ = torch.zeros(R, D)",
    ),
    Part(
        "counted buffer",
        "self.n$ += 1\nh = h / self.n$",
        "self.register_buffer('n$', torch.zeros((), dtype=torch.long))",
    ),
    Part("counter", "self.t$ += 1", "self.t$ = 0"),
    Part("counter", "self.t$ += 1\nh = h * min(1.0, self.t$ / 5)", "self.t$ = 0"),
    Part("counter", "CALLS[0] += 1\nh = h / (1 + CALLS[0])"),
    Part(
        "branch on a counter",
        "self.t$[0] += 1\nh = h.{tanh|exp|relu|sigmoid|square}() if self.t$[0] <= {1|2|3|4} else h.{sin|cos|erf|abs}()",
        "self.t$ = [0]",
        weight=OFTEN,
    ),
    Part(
        "branch on a counter",
        "self.t$ += 1\nif self.t$ % 2:\n    h = self.l$(h)",
        "self.t$ = 0\nself.l$ = nn.Linear(D, D)",
    ),
    Part("log", "self.log$.append({float(h.detach().sum())|h.detach().mean(0)})", "self.log$ = []"),
    Part("log", "self.last$ = h{|.detach()}", "self.last$ = None", after_step="@.last$ = None"),
    Part(
        "counting hook",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)\nself.n$ = [0]\nself.l$.register_forward_hook(Counting(self.n$))",
    ),
    Part("random of Python's", "h = h * random.random()"),
    Part("random of Python's", "h = h.tanh() if random.random() < 0.5 else h.sin()"),
    Part(
        "random of Python's",
        "if random.random() < 0.3:\n    h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
    ),
    Part("random of NumPy's", "h = h + float(np.random.{rand|randn}())"),
    Part("random of NumPy's", "h = h * torch.from_numpy(np.random.rand(D)).to(h.dtype)"),
]

# State in places of every kind that Python has.
PLACES = [
    Part(
        "swapped tensors",
        "o = torch.full((D,), 3.0)\nh = h + self.o$\ntorch.utils.swap_tensors(self.o$, o)\n"
        "h = (h {+|-} self.o$).tanh()",
        "self.o$ = torch.ones(D)",
    ),
    Part("iterator", "h = h / next(self.i$)", "self.i$ = itertools.count(1)"),
    Part("iterator", "h = h * next(self.i$)", "self.i$ = itertools.cycle([1.0, 0.5, 2.0])"),
    Part("generator object", "h = h / next(self.i$)", "self.i$ = counted()"),
    Part("slots", "self.o$.count += 1\nh = h / self.o$.count", "self.o$ = Slotted()"),
    Part("plain object", "self.o$.count += 1\nh = h / self.o$.count", "self.o$ = SimpleNamespace(count=0)"),
    Part(
        "plain object",
        "self.o$.inner.inner.count += 1\nh = h / self.o$.inner.inner.count",
        "self.o$ = SimpleNamespace(inner=SimpleNamespace(inner=SimpleNamespace(count=0)))",
    ),
    Part(
        "deep container",
        "self.o$['a'][0]['b'][0] += 1\nh = h / self.o$['a'][0]['b'][0]",
        "self.o$ = {'a': [{'b': [0]}]}",
    ),
    Part(
        "deep container",
        "self.o$['a'][0]['b'][0]['c'][0] += 1\nh = h / self.o$['a'][0]['b'][0]['c'][0]",
        "self.o$ = {'a': [{'b': [{'c': [0]}]}]}",
    ),
    Part(
        "container",
        "self.o$.append(len(self.o$))\nh = h / (1 + self.o${[-1]|[0]})",
        "self.o$ = {collections.deque(maxlen=3)|[]}",
    ),
    Part(
        "container",
        "self.o$['k'] = self.o$.get('k', 0) + 1\nh = h / self.o$['k']",
        "self.o$ = {dict()|collections.Counter()|collections.OrderedDict()|collections.defaultdict(int)}",
    ),
    Part("container", "self.o$.add(len(self.o$))\nh = h / len(self.o$)", "self.o$ = set()"),
    Part("container", "h = h * self.o$.pop(0)\nself.o$.append(0.5)", "self.o$ = [1.0, 2.0, 3.0]"),
    Part("bytes", "self.o$[0] += 1\nh = h / self.o$[0]", "self.o$ = bytearray(2)"),
    Part("array", "self.o$[0] += 1\nh = h / self.o$[0].item()", "self.o$ = np.zeros(2)"),
    Part("array", "self.o$ = self.o$ + 1\nh = h / float(self.o$.sum())", "self.o$ = np.zeros(2)"),
    Part(
        "tensors in a container",
        "self.o$[0] = self.o$[0] * 0.5 + h.detach().mean()\nh = h - self.o$[0]",
        "self.o$ = [torch.zeros(())]",
    ),
    Part(
        "tensors in a container",
        "self.o$['h'] = (h + self.o$['h']).tanh()\nh = h - self.o$['h']",
        "self.o$ = {'h': torch.zeros(R, D)}",
        before_step="@.o$['h'] = torch.zeros(R, D)",
    ),
    Part(
        "tensors in a container",
        "self.o$.append(h.detach())\nh = h + torch.stack(list(self.o$)).mean(0)",
        "self.o$ = collections.deque(maxlen=2)",
    ),
    Part("class attribute", "type(self).count = getattr(type(self), 'count', 0) + 1\nh = h / type(self).count"),
    Part("global", "COUNTS['$'] = COUNTS.get('$', 0) + 1\nh = h / COUNTS['$']", "COUNTS.pop('$', None)"),
    Part("global", "global SEEN\nSEEN += 1\nh = h / SEEN", "global SEEN\nSEEN = 0"),
    Part("global of a helper's", "h = h / bump()", "CALLS[0] = 0"),
    Part("function attribute", "stamp.count += 1\nh = h / stamp.count", "stamp.count = 0"),
    Part("default argument", "h = h / remember()", "remember.__defaults__[0].clear()"),
    Part("closure", "h = h / self.f$()", "self.f$ = counter_in_a_closure()"),
    Part("partial", "h = h / self.f$()", "self.f$ = functools.partial(push, [])"),
    Part(
        "cache",
        "h = h * self.memo$(float(h.detach().sum()) > 0)",
        "self.memo$ = functools.lru_cache(lambda key: random.random())",
    ),
    Part(
        "own generator of Python's",
        "h = h * self.o$.{random()|uniform(0.5, 1.5)|gauss(1.0, 0.2)}",
        "self.o$ = random.Random(3)",
    ),
    Part("own generator of Python's", "h = h + random.gauss(0.0, 0.2)"),
    Part(
        "own generator of NumPy's",
        "h = h * self.o$.random()",
        "self.o$ = np.random.default_rng(3)",
    ),
    Part("own generator of NumPy's", "h = h * self.o$.rand()", "self.o$ = np.random.RandomState(3)"),
    Part(
        "reference to another module",
        "self.o$[0].t += 1\nh = h / self.o$[0].t",
        "other = nn.Identity()\nother.t = 0\nself.o$ = [other]",
    ),
    Part(
        "created when first called",
        "if not hasattr(self, 'w$'):\n"
        "    self.w$ = {torch.randn(D)|h.detach().mean(0)|nn.Parameter(torch.ones(D))}\nh = h + self.w$",
    ),
    Part("lazy layer", "h = self.l$(h)", "self.l$ = nn.LazyLinear(D)"),
    Part("freed state", "h = h + self.o$\ndel self.o$", "self.o$ = None", before_call="@.o$ = torch.{ones|rand}(D)"),
    Part("file", "self.o$.write('a')\nh = h / self.o$.tell()", "self.o$ = io.StringIO()"),
    Part(
        "toggled parameter",
        "self.l$.weight.requires_grad_(not self.l$.weight.requires_grad)\nh = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        weight=RARE,
    ),
    Part(
        "swapped layers",
        "self.l$, self.k$ = self.k$, self.l$\nh = self.l$(h)",
        "self.l$, self.k$ = nn.Linear(D, D), nn.Linear(D, D)",
    ),
    Part(
        "mode of its own",
        "self.train(not self.training)\nh = F.dropout(h, 0.3, self.training)",
        after_step="model.train()",
    ),
    Part(
        "data written",
        "self.b$.data.mul_(0.5)\nh = h {+|*} self.b$.detach().clone()",
        "self.register_buffer('b$', torch.ones(D))",
    ),
    Part(
        "data written",
        "self.b$.data = self.b$.data * 0.5\nh = h + self.b$",
        "self.register_buffer('b$', torch.ones(D))",
    ),
    Part(
        "data written",
        "with torch.no_grad():\n    self.p$.mul_(0.9)\nh = h + self.p$",
        "self.p$ = nn.Parameter(torch.ones(D))",
    ),
]

CARRIED = [
    Part(
        "carried state",
        "self.h$ = torch.{tanh|sigmoid|sin}(self.i$(h + self.h$))\nh = {self.h$|h + self.h$|self.h$ * 0.5}",
        "self.i$ = nn.Linear(D, D)\nself.h$ = torch.zeros(R, D)",
        before_step="@.h$ = {@.h$.detach()|torch.zeros(R, D)}",
    ),
    Part(
        "carried state",
        "self.v$ = 0.7 * self.v$ + h\ns = (self.v$ > 0.5).to(h.dtype)\n"
        "self.v$ = self.v$ - s.detach()\nh = h + s + self.v$.sigmoid()",
        "self.v$ = torch.zeros(R, D)",
        before_step="@.v$ = torch.zeros(R, D)",
    ),
    Part(
        "condition",
        "h = h {+|*} self.cond$",
        "self.e$ = nn.Linear(4, D)\nself.cond$ = None",
        before_call="@.cond$ = @.e$(torch.randn(R, 4)){|.tanh()|.detach()|.square()}",
        weight=OFTEN,
    ),
    Part(
        "condition",
        "h = h.tanh() * self.context$['c']",
        "self.e$ = nn.Linear(4, D)\nself.context$ = {}",
        before_call="@.context$['c'] = @.e$(torch.randn(4))",
    ),
    Part(
        "hypernetwork",
        "h = F.linear(h, self.w$)",
        "self.y$ = nn.Linear(3, D * D)\nself.w$ = None",
        before_call="@.w$ = @.y$(torch.randn(3)).view(D, D){|.T|.tanh()}",
    ),
    Part(
        "adapter",
        "h = self.l$(h) + h @ self.down$ @ self.up$",
        "self.l$ = nn.Linear(D, D)\nself.r$ = nn.Parameter(torch.randn(2, D) / D)\nself.down$ = self.up$ = None",
        before_call="@.down$, @.up$ = @.r$.T * 2, @.r$ * {2|3}",
    ),
    Part(
        "replaced mask",
        "h = h * self.k${|.to(h.dtype)|.logical_not()}",
        "self.k$ = None",
        before_call="@.k$ = torch.rand(R, D) > 0.5",
    ),
    Part("replaced index", "h = h[self.k$]", "self.k$ = None", before_call="@.k$ = torch.randperm(R)"),
    Part(
        "replaced sparse",
        "h = torch.sparse.mm(self.k$, h)",
        "self.k$ = None",
        before_call="@.k$ = torch.rand(R, R).to_sparse()",
    ),
    Part("replaced number", "h = h * self.k$", "self.k$ = 0.5", before_call="@.k$ += 0.25"),
]

# Spillway does not open a Hidden list. What it holds is changed here alone: of hidden state that a call advances, a
# re-run advances it once more, as docs/limits.md says.
# Writes of a parameter's .data between forward and backward are not drawn: autograd does not see them, and torch's own
# checkpoint computes with what was written, too.
CHANGES = [
    Part(
        "hidden number, flipped",
        "h = h{|.sin()|.tanh()} * self.o$[0]\n"
        "h = {h.abs()|h.square()|h.cos()|h.pow(4)|h * h|"
        "h @ h.T @ h.abs() / D|F.pad(torch.cdist(h, h), (0, D))[:, :D]}",
        "self.o$ = Hidden([1.0])",
        between="@.o$[0] = -@.o$[0]",
        weight=OFTEN,
    ),
    Part(
        "hidden number, replaced",
        "h = h * self.o$[0]",
        "self.o$ = Hidden([1.0])",
        between="@.o$[0] *= {0.5|-1.0|2.0}",
    ),
    Part(
        "hidden flag, flipped",
        "h = h.{tanh|abs|square}() if self.o$[0] else h.{sin|cos|erf}()",
        "self.o$ = Hidden([False])",
        between="@.o$[0] = not @.o$[0]",
        weight=OFTEN,
    ),
    Part(
        "flag, flipped",
        "h = h.{tanh|abs|square}() if self.f$ else h.{sin|cos|erf}()",
        "self.f$ = False",
        between="@.f$ = not @.f$",
    ),
    Part(
        "flag, flipped",
        "if self.f$:\n    h = self.l$(h)",
        "self.f$ = True\nself.l$ = nn.Linear(D, D)",
        between="@.f$ = not @.f$",
        weight=RARE,
    ),
    Part(
        "number, replaced",
        "h = h * self.s$\n{h = h * h|h = h.abs()|h = h.cos()|h = F.pad(torch.cdist(h, h), (0, D))[:, :D]|}",
        "self.s$ = 1.0",
        between="@.s$ = -@.s$",
        weight=OFTEN,
    ),
    Part("number, replaced", "h = h * self.s$[0] + self.s$[1]", "self.s$ = [1.0, 0.5]", between="@.s$[{0|1}] *= 0.5"),
    Part(
        "buffer, replaced",
        "h = h {+|*} self.b$",
        "self.b$ = torch.ones(D)",
        between="@.b$ = torch.full((D,), {2.0|-1.0})",
    ),
    Part(
        "buffer, written",
        "h = h + self.b$",
        "self.register_buffer('b$', torch.ones(D))",
        between="@.b$.{mul_(2)|zero_()|neg_()}",
    ),
    Part(
        "buffer, written",
        "h = h * self.b$\nh = h{.abs()|.square()|.sin()}",
        "self.b$ = torch.ones(D)",
        between="@.b$.neg_()",
    ),
    Part("counter, advanced", "h = h / (1 + self.t$)", "self.t$ = 0", between="@.t$ += 1"),
    Part(
        "draws, between",
        "h = h * 1",
        between="{random.random()|torch.rand(3)|np.random.rand(2)|torch.manual_seed(1)|random.seed(3)}",
    ),
    Part("mode, flipped", "h = F.dropout(h, 0.2, self.training)", between="model.eval()", after_step="model.train()"),
    Part(
        "mode, flipped",
        "h = self.n$(h)",
        "self.n$ = nn.BatchNorm1d(D)",
        between="model.eval()",
        after_step="model.train()",
    ),
    Part(
        "parameter, written",
        "h = h {+|*} self.p$",
        "self.p$ = nn.Parameter(torch.ones(D))",
        between="with torch.no_grad():\n    @.p$.{add_(1)|mul_(2)}",
    ),
    Part(
        "parameter, replaced",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        between="@.l$.{weight = nn.Parameter(torch.eye(D))|bias = nn.Parameter(torch.ones(D))}",
        weight=RARE,
    ),
    Part(
        "module, replaced",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        between="@.l$ = nn.{Tanh()|Linear(D, D)}",
        weight=RARE,
    ),
    Part(
        "parameter, frozen",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        after_step="@.l$.weight.requires_grad_(not @.l$.weight.requires_grad)",
    ),
    Part("input, written", "h = h {+|*} 2", between="x.detach().add_(1)", weight=RARE),
    Part(
        "setting, around",
        "h = self.c$(h[:, None]).sum(1)",
        "self.c$ = nn.Conv1d(1, 4, 3, padding=1)",
        around="torch.backends.mkldnn.flags(enabled=False)",
    ),
    Part(
        "setting, around",
        "h = self.c$(h.sin()[:, None]).sum(1)",
        "self.c$ = nn.Conv1d(1, 4, 3, padding=1)",
        around="torch.backends.mkldnn.flags(enabled=False)",
    ),
    Part(
        "setting, around",
        "h = h @ (h.T @ h){|.abs()} / (R * D)",
        around="{precision('medium')|deterministic()|torch.backends.mkldnn.flags(enabled=False)}",
    ),
    Part(
        "setting, around",
        "h = h + torch.linspace(0, 1, D){|.sin()|.pow(2)}.to(h.dtype) * h",
        around="default_dtype(torch.float64)",
    ),
    Part(
        "setting, flipped",
        "h = self.c$(h[:, None]).sum(1)",
        "self.c$ = nn.Conv1d(1, 4, 3, padding=1)",
        between="torch.backends.mkldnn.set_flags(False)",
        after_step="torch.backends.mkldnn.set_flags(True)",
    ),
    Part(
        "changed between steps",
        "h = h * self.s$",
        "self.s$ = 1.0",
        after_step="@.s$ = @.s$ * -0.5",
    ),
    Part(
        "changed between steps", "h = h.tanh() if self.f$ else h.sin()", "self.f$ = False", after_step="@.f$ = not @.f$"
    ),
    Part("changed between steps", "h = h * self.b$", "self.b$ = torch.ones(D)", after_step="@.b$ = torch.randn(D)"),
    Part(
        "changed between steps",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        after_step="with torch.no_grad():\n    @.l$.weight.clamp_(-0.1, 0.1)",
    ),
    Part(
        "changed between steps",
        "h = self.l$(h)",
        "self.l$ = nn.Linear(D, D)",
        after_step="@.l$ = nn.Linear(D, D)",
        weight=RARE,
    ),
]
