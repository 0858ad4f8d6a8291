"""Exact identities of landmark, block and test-time-training operators, and independent implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError
from vit2linear.operator import Operator
from vit2linear.ops import nystrom, soft
from vit2linear.ops._landmarks import landmark_grid
from vit2linear.recipe import OPERATORS

HEADS, DIM, PREFIX, GRID = 3, 8, 2, (6, 8)
TOKENS = PREFIX + GRID[0] * GRID[1]
NAMES = ["agent", "nystrom", "soft", "rela", "mhla", "ttt", "t5"]


def make(name: str, **options: Any) -> Operator:
    """As a conversion starts with it."""
    torch.manual_seed(0)
    kind = OPERATORS.get(name)
    op: Operator = kind(HeadGeometry(HEADS * DIM, HEADS, DIM, DIM**-0.5), kind.Options(**options)).double()
    return op.requires_grad_(False)


def tensors(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, tokens, DIM, generator=generator, dtype=torch.float64)
    return q, k, v


def context(grid: tuple[int, int] = GRID, prefix: int = PREFIX, mask: Tensor | None = None) -> AttentionContext:
    x = torch.randn(2, prefix + grid[0] * grid[1], HEADS * DIM, dtype=torch.float64)
    return AttentionContext(x, grid, prefix, mask)


def constant_cells(x: Tensor, grid: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    """Patches that are equal within each cell of ``grid``: (batch, heads, patches, head_dim)."""
    x = x[:, :, : cells[0] * cells[1]].unflatten(2, cells)
    x = x.repeat_interleave(grid[0] // cells[0], 2).repeat_interleave(grid[1] // cells[1], 3)
    return x.flatten(2, 3)


@pytest.mark.parametrize("name", ["agent", "nystrom", "soft", "mhla"])
def test_key_mask_is_refused_by_what_depends_on_the_whole_grid(name: str) -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    with pytest.raises(SurgeryError, match=name):
        make(name)(*tensors(), context(mask=mask))


@pytest.mark.parametrize(
    ("name", "options"), [("agent", {"landmarks": 0}), ("nystrom", {"landmarks": -1}), ("mhla", {"blocks": 0})]
)
def test_bad_options_are_recipe_errors(name: str, options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=f"operator '{name}': {next(iter(options))} is"):
        make(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_is_built_on_the_meta_device(name: str) -> None:
    kind = OPERATORS.get(name)
    with torch.device("meta"):
        op = kind(HeadGeometry(HEADS * DIM, HEADS, DIM, 1.0), kind.Options())
    assert all(t.is_meta for t in op.state_dict().values())
    assert op.state_dict().keys() == make(name).state_dict().keys()


def test_landmarks_are_at_most_a_quarter_of_the_patches() -> None:
    assert [make("agent").landmarks(n) for n in (1, 3, 16, 196, 4096)] == [1, 1, 4, 49, 49]
    assert [make("nystrom").landmarks(n) for n in (196, 256, 4096)] == [49, 64, 64]
    assert make("relu").landmarks(196) is None
    assert landmark_grid(14, 14, 49) == (7, 7) and landmark_grid(1, 64, 16) == (1, 16)
    for rows in range(1, 20):
        for columns in range(1, 20):
            limit = make("soft").landmarks(rows * columns)
            across, along = landmark_grid(rows, columns, limit)
            assert 1 <= across <= rows and 1 <= along <= columns and across * along <= limit


@pytest.mark.parametrize("grid", [(6, 8), (7, 9), (5, 11)], ids=str)
def test_landmarks_equal_torch_adaptive_pooling(grid: tuple[int, int]) -> None:
    op, x = make("agent"), tensors(PREFIX + grid[0] * grid[1])[0]
    ctx = context(grid)
    patches = x[:, :, PREFIX:].flatten(0, 1).mT.unflatten(2, grid)
    wanted = F.adaptive_avg_pool2d(patches, op.pooled_grid(ctx)).flatten(2).mT.unflatten(0, x.shape[:2])
    torch.testing.assert_close(op.pool(x, ctx), wanted)


def test_agent_rows_sum_to_one_and_zero_queries_are_uniform() -> None:
    q, k, v = tensors()
    op = make("agent")
    torch.testing.assert_close(op.map(q, k, context()).sum(-1), torch.ones(2, HEADS, TOKENS, dtype=torch.float64))
    torch.testing.assert_close(op(0 * q, k, v, context()), v.mean(2, keepdim=True).expand_as(v))


def test_agent_bias_starts_without_effect_and_tells_positions_apart() -> None:
    q, k, _ = tensors()
    plain, op = make("agent"), make("agent", bias=True)
    wanted = plain.map(q, k, context())
    torch.testing.assert_close(op.map(q, k, context()), wanted)
    op.patch_bias += 0.7
    op.prefix_bias += 0.7
    torch.testing.assert_close(op.map(q, k, context()), wanted)  # softmax does not see a constant
    op.prefix_bias[0] = -1e3
    assert not op.map(q, k, context())[..., :PREFIX].any()  # as keys all prefix tokens share one scalar
    op.prefix_bias[0], op.patch_bias[0, ..., :, 3:] = 0.7, -1e3
    right = op.map(q, k, context())[..., PREFIX:].unflatten(-1, GRID)[..., 4:]
    assert not right.any() and op.map(q, k, context())[..., PREFIX:].any()


def test_nystrom_equals_transformers() -> None:
    """Segment means of transformers' Nyströmformer are pools of a grid of one row."""
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_landmarks=12, segment_means_seq_len=48
    )
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.conv_kernel_size = None
    theirs.init_option = "exact"  # a first inverse for each matrix, not for the batch
    x = 3 * torch.randn(2, 48, HEADS * DIM, dtype=torch.float64)
    q, k, v = (f(x).unflatten(2, (HEADS, DIM)).transpose(1, 2) for f in (theirs.query, theirs.key, theirs.value))
    with torch.no_grad():
        heads = make("nystrom", landmarks=12)(q, k, v, context((1, 48), 0))
        torch.testing.assert_close(heads.transpose(1, 2).flatten(2), theirs(x)[0])


def test_nystrom_equals_softmax_where_landmarks_are_the_tokens() -> None:
    """In an image of constant 2 x 2 cells every token equals its landmark; peaked, so that six steps converge."""
    q = 10 * F.normalize(constant_cells(tensors()[0], GRID, (3, 4)), dim=-1)
    v, ctx = tensors()[2][:, :, PREFIX:], context(prefix=0)
    torch.testing.assert_close(make("nystrom")(q, q, v, ctx), make("softmax")(q, q, v, ctx), rtol=1e-6, atol=1e-6)


def test_pseudo_inverse_equals_torch() -> None:
    matrix = (4 * torch.eye(6, dtype=torch.float64) + tensors(6)[0][..., :6]).softmax(-1)
    torch.testing.assert_close(nystrom.pseudo_inverse(matrix, steps=12), torch.linalg.pinv(matrix))


def test_soft_is_symmetric_and_does_not_see_the_keys() -> None:
    q, k, _ = tensors()
    routing = make("soft").map(q, k, context())
    torch.testing.assert_close(routing, routing.mT)
    assert torch.equal(routing, make("soft").map(q, 7 - k, context()))


def test_soft_is_the_gaussian_kernel_where_landmarks_are_the_tokens() -> None:
    q = constant_cells(tensors()[0], GRID, (3, 4))
    landmarks = tensors()[0][:, :, :12]
    outer, middle = soft.gaussian(q, landmarks), soft.gaussian(landmarks, landmarks)
    distance = torch.cdist(q, q, compute_mode="donot_use_mm_for_euclid_dist")
    inverse = soft.newton_inverse(middle, steps=40, ridge=0.0)
    torch.testing.assert_close(outer @ inverse @ outer.mT, (-distance.square() / 2).exp())


def test_newton_inverse_and_its_gradient_equal_torch() -> None:
    x = tensors(6)[0]
    matrix = soft.gaussian(x, x).requires_grad_()
    weight = torch.randn_like(matrix)
    mine = soft.newton_inverse(matrix)
    theirs = torch.linalg.inv(matrix + 0.01 * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(*(torch.autograd.grad((i * weight).sum(), matrix)[0] for i in (mine, theirs)))


def test_rela_is_linear_attention_where_all_logits_are_positive() -> None:
    q, k, v = tensors()
    wanted = q.abs() @ (k.abs().mT @ v) * DIM**-0.5 / TOKENS
    torch.testing.assert_close(make("rela")(q.abs(), k.abs(), v, context()), wanted)


def test_rela_adds_the_bias_before_rectifying_and_an_infinite_bias_is_a_mask() -> None:
    (q, k, v), op = tensors(), make("rela")
    mask = torch.rand(2, TOKENS) < 0.7
    bias = torch.randn(2, 1, TOKENS, TOKENS, dtype=torch.float64)
    masked, biased = context(mask=mask), context()
    masked.bias, biased.bias = bias, bias.masked_fill(~mask[:, None, None], float("-inf"))
    torch.testing.assert_close(op(q, k, v, masked), op(q, k, v, biased))
    wanted = F.relu(DIM**-0.5 * q @ k.mT + bias) * mask[:, None, None] / mask.sum(-1)[:, None, None, None]
    torch.testing.assert_close(op.map(q, k, biased), wanted)


@pytest.mark.parametrize("options", [{"blocks": 1}, {"blocks": 3}], ids=str)
def test_mhla_with_equal_mixing_is_relu_attention(options: dict[str, int]) -> None:
    q, k, v = tensors()
    op = make("mhla", **options)
    if options["blocks"] > 1:
        op.mixing.fill_(0.3)
        q = q + 3  # with the same floor under the row mean, rows far above it are the same
    torch.testing.assert_close(op(q, k, v, context()), make("relu")(q, k, v, context()), rtol=1e-5, atol=1e-5)


def test_mhla_with_identity_mixing_is_relu_attention_in_each_block() -> None:
    q, k, v = (t + 1 for t in tensors())
    op = make("mhla", blocks=2)
    op.mixing.copy_(torch.eye(5))
    out = op(q, k, v, context())

    def block(t: Tensor, i: int, j: int) -> Tensor:
        return t[:, :, PREFIX:].unflatten(2, GRID)[:, :, 3 * i : 3 * i + 3, 4 * j : 4 * j + 4].flatten(2, 3)

    for i in range(2):
        for j in range(2):
            alone = make("relu")(*(block(t, i, j) for t in (q, k, v)), context((3, 4), 0))
            torch.testing.assert_close(block(out, i, j), alone, rtol=1e-5, atol=1e-5)


def test_mhla_is_a_kernel_whose_features_are_copied_for_each_block() -> None:
    q, k, v = tensors()
    op = make("mhla", blocks=2)
    block = torch.arange(GRID[0])[:, None] // 3 * 2 + torch.arange(GRID[1]) // 4 + 1
    block = torch.cat([torch.zeros(PREFIX, dtype=torch.long), block.flatten()])
    phi_q = torch.einsum("nb,zhnd->zhnbd", op.mixing[block], F.relu(q)).flatten(3)
    phi_k = torch.einsum("nb,zhnd->zhnbd", torch.eye(5, dtype=torch.float64)[block], F.relu(k)).flatten(3)
    wanted = make("relu")(phi_q, phi_k, v, context())
    torch.testing.assert_close(op(q, k, v, context()), wanted)
    ranks = torch.linalg.matrix_rank(op.map(q, k, context()))
    assert ranks.min() > DIM and op.mixing[1].tolist() == pytest.approx([1, 1, 1 - 0.5**0.5, 1 - 0.5**0.5, 0.05])
    op.requires_grad_()(q, k, v, context()).square().sum().backward()
    assert op.mixing.grad.all()  # no pair of blocks is cut off from learning


@pytest.mark.parametrize("name", ["ttt", "t5"])
def test_inner_weights_stay_without_values(name: str) -> None:
    q, k, v = tensors()
    op = make(name)
    first, second = q @ op.w1, q @ op.w2
    wanted = first * F.silu(second) if name == "ttt" else (F.silu(first) * second) @ op.w3
    torch.testing.assert_close(op(q, k, 0 * v, context()), wanted)


def test_ttt_with_a_linear_inner_model_is_linear_attention() -> None:
    """With a constant channel, W1 = 0 and W2 reading that channel, f is linear in W1, and small steps are unclipped."""
    q, k, v = tensors()
    q[..., 0] = k[..., 0] = 1.0
    op, gate = make("ttt"), F.silu(torch.tensor(2.0, dtype=torch.float64))
    op.w1.zero_()
    op.w2.zero_()
    op.w2[:, 0] = 2.0
    wanted = gate**2 * q @ (k.mT @ v) / (3 * TOKENS)
    torch.testing.assert_close(op(q, k, 1e-7 * v, context()) / 1e-7, wanted, rtol=1e-5, atol=1e-6)


def test_ttt_starts_without_its_convolution_which_then_sees_patches_only() -> None:
    q, k, v = tensors()
    op, one, two = make("ttt"), context(), context()
    start = op(q, k, v, one)
    assert torch.equal(start, op(q, k, v, two))
    op.output.weight.normal_()
    moved = op(q, k, v, one) - start
    assert not moved[:, :, :PREFIX].any() and moved[:, :, PREFIX:].abs().amax(-1).min() > 0


def test_t5_does_not_see_a_shift_of_the_keys() -> None:
    q, k, v = tensors()
    op, shift = make("t5"), torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)
    op.k_local.conv.weight.normal_()
    torch.testing.assert_close(op(q, k + shift, v, context()), op(q, k, v, context()))


def test_t5_convolutions_start_inert_and_see_patches_only() -> None:
    (q, k, v), op = tensors(), make("t5")
    start = op(q, k, v, context())
    op.q_local.conv.weight.normal_()
    moved = op(q, k, v, context()) - start
    assert not moved[:, :, :PREFIX].any() and moved[:, :, PREFIX:].abs().amax(-1).min() > 0
