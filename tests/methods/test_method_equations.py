"""Each method against its equation on models written from theirs, and at its start."""

import pytest
import torch
from equations import Terms, attend, repeat
from torch.nn.functional import elu, gelu, layer_norm

import foreword as fw
import zoo
from foreword import combines, sources


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def test_the_equations_are_the_model(twin, ids):
    close(twin.naive(ids), twin.logits(ids))


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def bottleneck(state, place, x, scale=1.0):
    """s·(ReLU(LN(x) W_d + b_d) W_u + b_u), LN?, from the tensors of an adapter file."""
    get = {
        key.removeprefix(f"0.{place}.adapter."): value for key, value in state.items() if f"0.{place}.adapter." in key
    }
    if "norm_in.weight" in get:
        x = layer_norm(x, x.shape[-1:], get["norm_in.weight"], get["norm_in.bias"])
    hidden = (x @ get["down"].T + get.get("down_bias", 0)).clamp(min=0)
    out = get.get("learned_scale", scale) * (hidden @ get["up"].T + get.get("up_bias", 0))
    if "norm_out.weight" in get:
        out = layer_norm(out, out.shape[-1:], get["norm_out.weight"], get["norm_out.bias"])
    return out


class Parallel(Terms):
    def __init__(self, state, scale):
        self.state, self.scale = state, scale

    def heads(self, site, x, raw, query, out):
        return out + bottleneck(self.state, site, x, self.scale).unflatten(-1, (out.shape[1], -1)).transpose(1, 2)

    def output(self, site, x, h):
        return h + bottleneck(self.state, site.replace(".", "-output."), x, self.scale)

    def ffn(self, site, x, h):
        return h + bottleneck(self.state, site, x, self.scale)


def only(terms, *places):
    """`terms` acting at `places` alone."""
    return type("Only", (Terms,), {place: getattr(terms, place) for place in places})()


@pytest.mark.parametrize(
    "options", [{}, {"scale": "learned"}, {"bias": True, "init": "bert"}, {"norm": "in"}, {"norm": "out"}]
)
@pytest.mark.parametrize(
    ("site", "place"),
    [
        ({"site": "ffn"}, "ffn"),
        ({"site": "attention"}, "heads"),
        ({"site": "attention", "output": "projected"}, "output"),
    ],
)
def test_parallel_adapter(twin, ids, site, place, options):
    state = twin.attach(fw.ParallelAdapter(bottleneck=5, **site, **options))
    close(twin.logits(ids), twin.naive(ids, only(Parallel(state, 4.0), place)))


class Sequential(Terms):
    def __init__(self, state):
        self.state = state

    def output(self, site, x, h):
        return h + bottleneck(self.state, site.replace(".", "-output."), h)

    def ffn(self, site, x, h):
        return h + bottleneck(self.state, site, h)


@pytest.mark.parametrize(
    ("site", "places"), [("houlsby", ("output", "ffn")), ("attention", ("output",)), ("ffn", ("ffn",))]
)
def test_sequential_adapter(twin, ids, site, places):
    state = twin.attach(fw.SequentialAdapter(bottleneck=5, site=site))
    close(twin.logits(ids), twin.naive(ids, only(Sequential(state), *places)))


class Pfeiffer(Terms):
    """Behind the FFN; where a norm stands behind the residual sum, in front of it, reading the normalised sum."""

    def __init__(self, state, post_norm):
        self.state, self.post_norm = state, post_norm

    def ffn(self, site, x, h):
        return h if self.post_norm else h + bottleneck(self.state, site, h)

    def before_last_norm(self, site, s, norm):
        return s + bottleneck(self.state, f"{site}.final_layer_norm", norm(s))


def test_pfeiffer_adapter(twin, ids):
    state = twin.attach(fw.SequentialAdapter(bottleneck=5))
    terms = Pfeiffer(state, post_norm=twin.model.config.model_type == "bart")
    close(twin.logits(ids), twin.naive(ids, terms))


def test_i15_before_the_output_projection_is_behind_it_with_the_product(llama, ids):
    state = llama.attach(fw.ParallelAdapter(bottleneck=5, site="attention", init="bert"))
    before = llama.logits(ids)
    projections = [layer.self_attn.o_proj.weight for layer in llama.model.model.layers]
    fw.detach(llama.model, "default")
    behind = fw.attach(llama.model, fw.ParallelAdapter(bottleneck=5, site="attention", output="projected"))
    with torch.no_grad():
        for i, projection in enumerate(projections):
            own = behind.state_dict()
            own[f"0.self-output.{i}.adapter.down"].copy_(state[f"0.self.{i}.adapter.down"])
            own[f"0.self-output.{i}.adapter.up"].copy_(projection @ state[f"0.self.{i}.adapter.up"])
    close(llama.logits(ids), before)


def test_i16_the_scale_folds_into_the_second_layer_and_its_bias(llama, ids):
    state = llama.attach(fw.ParallelAdapter(bottleneck=5, scale=4.0, bias=True))
    scaled = llama.logits(ids)
    fw.detach(llama.model, "default")
    plain = fw.attach(llama.model, fw.ParallelAdapter(bottleneck=5, scale=1.0, bias=True)).state_dict()
    for name, tensor in state.items():
        plain[name].copy_(4.0 * tensor if ".up" in name else tensor)
    close(llama.logits(ids), scaled)


# ---------------------------------------------------------------------------------------------------------------------
# Terms inside the attention


class HeadNetworks(Terms):
    """o_h + ReLU(a_h W_d^h) W_u^h, head by head."""

    def __init__(self, state, rotated):
        self.state, self.rotated = state, rotated

    def heads(self, site, x, raw, query, out):
        a = query if self.rotated else raw
        down, up = (self.state[f"0.{site}.source.{name}"] for name in ("key", "value"))  # (H | G, r, D)
        shared = out.shape[1] // len(down)
        added = [(a[:, h] @ down[h // shared].T).clamp(min=0) @ up[h // shared] for h in range(out.shape[1])]
        return out + torch.stack(added, 1)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("heads", ["query", "key-value"])
def test_multihead_adapter(twin, ids, heads, rotated):
    state = twin.attach(fw.MultiheadAdapter(bottleneck=5, heads=heads, rotated=rotated))
    close(twin.logits(ids), twin.naive(ids, HeadNetworks(state, rotated)))


@pytest.mark.parametrize("reparam", ["shared", "per-layer"])
@pytest.mark.parametrize("heads", ["query", "key-value"])
def test_multihead_adapter_through_the_prefix_generator(twin, ids, heads, reparam):
    twin.attach(fw.MultiheadAdapter(bottleneck=5, heads=heads, reparam=reparam, hidden=7))
    generated = twin.logits(ids)
    folded = twin.model.foreword.adapters["default"].fold().state_dict()
    close(twin.logits(ids), generated)
    close(twin.naive(ids, HeadNetworks(folded, rotated=False)), generated)


def test_i14_a_multihead_adapter_is_a_block_diagonal_adapter_on_the_queries(llama, ids):
    """2·d·r parameters; a network of each head on the whole x has r·d·(H + 1)."""
    state = llama.attach(fw.MultiheadAdapter(bottleneck=5))
    d, r, heads = 32, 5, 4
    assert sum(tensor.numel() for tensor in state.values()) == 3 * 2 * d * r
    assert 2 * d * r < r * d * (heads + 1)

    class BlockDiagonal(Terms):
        def heads(self, site, x, raw, query, out):
            down = torch.block_diag(*state[f"0.{site}.source.key"])  # (H·r, d)
            up = torch.block_diag(*state[f"0.{site}.source.value"])  # (H·r, d)
            queries = raw.transpose(1, 2).flatten(-2)  # x W_q, (B, T, d)
            return out + ((queries @ down.T).clamp(min=0) @ up).unflatten(-1, (heads, -1)).transpose(1, 2)

    close(llama.logits(ids), llama.naive(ids, BlockDiagonal()))


FEATURES = {"elu": elu, "elu+1": lambda x: elu(x) + 1, "gelu": gelu}


class MemoryTerm(Terms):
    def __init__(self, state, features, rotated):
        self.state, self.features, self.rotated = state, FEATURES[features], rotated

    def heads(self, site, x, raw, query, out):
        memory = self.state[f"0.{site}.source.matrix"]  # (H, D, D)
        return out + torch.einsum("bhtd,hde->bhte", self.features(query if self.rotated else raw), memory)


@pytest.mark.parametrize(("features", "rotated"), [("elu", False), ("elu", True), ("elu+1", False), ("gelu", True)])
def test_prefix_memory(twin, ids, features, rotated):
    state = twin.attach(fw.PrefixMemory(features=features, rotated=rotated))
    close(twin.logits(ids), twin.naive(ids, MemoryTerm(state, features, rotated)))


def test_i19_a_kernel_over_a_prefix_is_a_memory_of_its_rank(llama, ids):
    """φ(q)ᵀ Σ φ(k) vᵀ = Σ (φ(q)·φ(k)) vᵀ, and the matrix has at most rank l."""
    point = fw.Point(sources.Direct(length=3, init="normal"), combines.Kernel("elu+1"))
    state = llama.attach(point)
    memories = {}
    for i in range(3):
        key, value = (repeat(state[f"0.self.{i}.source.{name}"], 4) for name in ("key", "value"))
        memories[f"0.self.{i}.source.matrix"] = (elu(key) + 1).transpose(-1, -2) @ value
    close(llama.logits(ids), llama.naive(ids, MemoryTerm(memories, "elu+1", rotated=False)))
    assert all(int(rank) <= 3 for memory in memories.values() for rank in torch.linalg.matrix_rank(memory, rtol=1e-5))


def read_alone(query, key, value):
    """A softmax of its own over keys and values (G, l, D) that all rows share: (B, H, T, D)."""
    batch = len(query)
    return attend(query, key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1), causal=False)


class SecondSoftmax(Terms):
    def __init__(self, state):
        self.state = state

    def heads(self, site, x, raw, query, out):
        key, value = self.state[f"0.{site}.source.key"], self.state[f"0.{site}.source.value"]
        return out + read_alone(query, key, value)


def test_ungated_prefix(twin, ids):
    state = twin.attach(fw.UngatedPrefix(length=4))
    close(twin.logits(ids), twin.naive(ids, SecondSoftmax(state)))


# ---------------------------------------------------------------------------------------------------------------------
# Prompts through frozen projections


def projections(model, site):
    """The weights (d, d_kv) and biases of keys and of values at a site."""
    kind, _, layer = site.partition(".")
    if hasattr(model, "transformer"):
        fused = model.transformer.h[int(layer)].attn.c_attn
        (_, *weights), (_, *biases) = fused.weight.chunk(3, dim=1), fused.bias.chunk(3)
        return list(zip(weights, biases, strict=True))
    stack = model.model.encoder if kind == "encoder" else getattr(model.model, "decoder", model.model)
    attention = getattr(stack.layers[int(layer)], "encoder_attn" if kind == "cross" else "self_attn")
    return [
        (linear.weight.T, 0 if linear.bias is None else linear.bias) for linear in (attention.k_proj, attention.v_proj)
    ]


def projected(model, site, prompt, width):
    """K = p W_k and V = p W_v (G, l, D): no norm before it, no rotation behind it."""
    return [
        (prompt @ weight + bias).unflatten(-1, (-1, width)).transpose(0, 1) for weight, bias in projections(model, site)
    ]


class Prompted(Terms):
    """Prompts in a softmax of their own, behind tanh g of each head; without a gate they are in the tokens' softmax."""

    def __init__(self, model, state):
        self.model, self.state = model, state

    def prefix(self, site):
        if f"0.{site}.source.prompt" not in self.state or f"0.{site}.combine.gate" in self.state:
            return None
        return projected(self.model, site, self.state[f"0.{site}.source.prompt"], 8)

    def heads(self, site, x, raw, query, out):
        gate = self.state.get(f"0.{site}.combine.gate")
        if gate is None:
            return out
        term = read_alone(query, *projected(self.model, site, self.state[f"0.{site}.source.prompt"], 8))
        return out + gate.tanh()[:, None, None] * term


@pytest.mark.parametrize("method", [fw.ZeroInit(length=4, layers=None), fw.RandomInit(length=4, layers=None)])
def test_prompts_through_frozen_projections(twin, ids, method):
    state = twin.attach(method)
    close(twin.logits(ids), twin.naive(ids, Prompted(twin.model, state)))


# ---------------------------------------------------------------------------------------------------------------------
# Compositions


class Mam(Terms):
    first_position = 4  # behind the prefix

    def __init__(self, state):
        self.state = state

    def prefix(self, site):
        return self.state[f"0.{site}.source.key"], self.state[f"0.{site}.source.value"]

    def ffn(self, site, x, h):
        down, up = self.state[f"1.{site}.adapter.down"], self.state[f"1.{site}.adapter.up"]
        return h + 4.0 * (x @ down.T).clamp(min=0) @ up.T


def test_mam(twin, ids):
    state = twin.attach(fw.Mam(length=4, bottleneck=5))
    close(twin.logits(ids), twin.naive(ids, Mam(state)))


def test_mam_is_a_composition(llama, ids):
    logits = []
    prefix, adapter = fw.PrefixTuning(length=30, hidden=800), fw.ParallelAdapter(site="ffn", bottleneck=512, scale=4.0)
    for method in (fw.Mam(), [prefix, adapter]):
        handle = fw.attach(llama.model, method)
        logits.append(llama.logits(ids))
        assert [part.method for part in handle.parts] == [prefix, adapter]
        fw.detach(llama.model, "default")
    assert torch.equal(*logits)


class V2(Terms):
    def __init__(self, state, scaling):
        self.state, self.scaling = state, scaling

    def _get(self, kind, name, what):
        if name.startswith("encoder-") and name[8].isdigit():
            kind, name = f"encoder-{kind}", name[8:]
        elif not name[0].isdigit():
            kind = f"{kind}.final"
        number, _, rest = name.partition(".")
        return self.state.get(f"0.{kind}.{name if not number.isdigit() else f'{number}.{rest}'}.{what}")

    def linear(self, name, x, y):
        scale, bias = self._get("linear", name, "scale"), self._get("linear", name, "bias")
        if self.scaling == "output":
            return scale * (y + bias)
        return y + bias

    def norm(self, name, x, y, plain):
        weight, bias = self._get("norm", name, "norm.weight"), self._get("norm", name, "norm.bias")
        return plain(x) * weight + (0 if bias is None else bias)


def test_llama_adapter_v2_scales_outputs(twin, ids):
    state = twin.attach(fw.LlamaAdapterV2(length=0), std=0.1)
    close(twin.logits(ids), twin.naive(ids, V2(state, "output")))


class V2WithPrompts(V2):
    """The prompts pass the same scales and biases as the tokens do."""

    def __init__(self, model, state):
        super().__init__(state, "output")
        self.model = model

    def heads(self, site, x, raw, query, out):
        prompt = self.state.get(f"1.{site}.source.prompt")
        if prompt is None:
            return out
        layer = site.removeprefix("self.")
        key, value = (
            self.linear(f"{layer}.self_attn-{name}", prompt, prompt @ weight).unflatten(-1, (-1, 8)).transpose(0, 1)
            for name, (weight, _) in zip(("k_proj", "v_proj"), projections(self.model, site), strict=True)
        )
        return out + self.state[f"1.{site}.combine.gate"].tanh()[:, None, None] * read_alone(query, key, value)


def test_llama_adapter_v2_prompts(llama, ids):
    state = llama.attach(fw.LlamaAdapterV2(length=4, early=2), std=0.1)
    close(llama.logits(ids), llama.naive(ids, V2WithPrompts(llama.model, state)))


def test_llama_adapter_v2_scales_inputs(llama, ids):
    """As the released 65B code: y = W (s ⊙ x) + b, here with the scale moved into the weights."""
    state = llama.attach(fw.LlamaAdapterV2(length=0, scaling="input", norms=False), std=0.1)
    scaled = llama.logits(ids)
    fw.set_active(llama.model, None)
    terms = V2(state, "input")
    terms.norm = lambda name, x, y, plain: y
    with torch.no_grad():
        for key, scale in state.items():
            if key.endswith(".scale"):
                layer, name = key.split(".")[2:4]
                llama.model.model.layers[int(layer)].get_submodule(name.replace("-", ".")).weight *= scale
    close(llama.naive(ids, terms), scaled)


def test_llama_adapter_v2_prompts_are_read_in_the_first_layer(llama):
    adapter = fw.attach(llama.model, fw.LlamaAdapterV2(length=4, early=2))
    gates = [name for name in adapter.named_parameters() if name.endswith("gate")]
    assert gates == ["1.self.0.combine.gate", "1.self.1.combine.gate"]


# ---------------------------------------------------------------------------------------------------------------------
# Step 0 (METHODS: "step 0 == base?")

SAME = [
    fw.ParallelAdapter(bottleneck=4),
    fw.ParallelAdapter(bottleneck=4, site="attention"),
    fw.ParallelAdapter(bottleneck=4, scale="learned", bias=True),
    fw.SequentialAdapter(bottleneck=4, init="lora"),
    fw.MultiheadAdapter(bottleneck=4),
    fw.PrefixMemory(),
    fw.Lora(),
    fw.Vera(),
    fw.IA3(),
    fw.LlamaAdapterV2(),
    fw.LlamaAdapterV2(scaling="input"),
    fw.ZeroInit(length=4),
    fw.ZeroInitNonlinear(length=4),
    fw.Full(),
]
DIFFERENT = [
    fw.SequentialAdapter(bottleneck=4),
    fw.ParallelAdapter(bottleneck=4, init="bert"),
    fw.UngatedPrefix(length=4),
    fw.Mam(length=4, bottleneck=4),
    fw.UniPELT(length=4),
    fw.MultiheadAdapter(bottleneck=4, reparam="shared"),
    fw.PrefixTuning(length=4),
    fw.PrefixTuning(length=4, init="zero"),
    fw.DeepPrompt(length=4),
    fw.PromptTuning(length=4),
    fw.RandomInit(length=4, layers=None),
    fw.Cartridge(length=4),
    fw.ParScale(length=4),
]


@pytest.mark.parametrize("method", SAME, ids=repr)
def test_step_0_is_the_base_bit_for_bit(twin, ids, method):
    base = twin.logits(ids)
    fw.attach(twin.model, method)
    assert torch.equal(twin.logits(ids), base)


@pytest.mark.parametrize("method", DIFFERENT, ids=repr)
def test_step_0_is_not_the_base(twin, ids, method):
    base = twin.logits(ids)
    if twin.model.config.is_encoder_decoder and method.name in ("prompt-tuning", "cartridge", "parscale"):
        pytest.skip(f"{method.name} is for decoders")
    fw.attach(twin.model, method)
    assert (twin.logits(ids) - base).abs().max() > 1e-4


def test_step_0_of_bitfit_is_the_base():
    model = zoo.make("gpt2")  # it needs biases
    ids = torch.arange(3, 9)[None]
    base = model(ids).logits
    fw.attach(model, "bitfit")
    assert torch.equal(model(ids).logits, base)


def test_every_method_has_its_step_0_above():
    assert {method.name for method in (*SAME, *DIFFERENT)} | {"bitfit"} == set(fw.methods())
