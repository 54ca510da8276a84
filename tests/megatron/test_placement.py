"""Where each Megatron parameter goes: the specification's table, by the names Megatron uses."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_aro.config import AROConfig
from megatron_aro.megatron.matrices import place
from megatron_aro.megatron.names import canonical_name
from megatron_aro.megatron.report import placement_table
from megatron_aro.sharding import geometry
from megatron_aro.sharding.rules import check_used, unused

HIDDEN, FFN, HEADS, GROUPS, HEAD = 8, 12, 4, 2, 3
MODEL = SimpleNamespace(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    kv_channels=HEAD,
    gated_linear_unit=True,
    attention_output_gate=False,
)
LAYER = "decoder.layers.3."
QKV = (HEADS + 2 * GROUPS) * HEAD


def placed(name, *shape, model=MODEL, aro=None, tp=1, **attributes):
    parameter = torch.nn.Parameter(torch.empty(shape))
    for key, value in attributes.items():
        setattr(parameter, key, value)
    return place(name, parameter, model, AROConfig(**(aro or {})), tp)


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        (
            LAYER + "self_attention.linear_qkv.weight",
            (QKV, HIDDEN),
            {"q": (8, 12), "k": (8, 6), "v": (8, 6)},
        ),
        (LAYER + "self_attention.linear_proj.weight", (HIDDEN, 12), {"": (8, 12)}),
        (LAYER + "mlp.linear_fc1.weight", (2 * FFN, HIDDEN), {"gate": (8, 12), "up": (8, 12)}),
        (LAYER + "mlp.linear_fc2.weight", (HIDDEN, FFN), {"": (8, 12)}),
        (LAYER + "mlp.router.weight", (5, HIDDEN), {"": (8, 5)}),
        (
            LAYER + "mlp.experts.local_experts.1.linear_fc1.weight",
            (2 * FFN, HIDDEN),
            {"gate": (8, 12), "up": (8, 12)},
        ),
        (LAYER + "mlp.experts.local_experts.1.linear_fc2.weight", (HIDDEN, FFN), {"": (8, 12)}),
        (
            LAYER + "mlp.experts.linear_fc1.weight7",
            (2 * FFN, HIDDEN),
            {"gate": (8, 12), "up": (8, 12)},
        ),
        (LAYER + "mlp.experts.linear_fc2.weight0", (HIDDEN, FFN), {"": (8, 12)}),
        (
            LAYER + "mlp.shared_experts.linear_fc1.weight",
            (2 * FFN, HIDDEN),
            {"gate": (8, 12), "up": (8, 12)},
        ),
        (LAYER + "mlp.shared_experts.gate_weight", (1, HIDDEN), {"": (8, 1)}),
        ("mtp.layers.0.eh_proj.weight", (HIDDEN, 2 * HIDDEN), {"": (8, 16)}),
        (LAYER + "mixer.out_proj.weight", (HIDDEN, 16), {"": (8, 16)}),
        *[
            (f"{LAYER}{module}.weight", (rows, HIDDEN), {"": (8, rows)})
            for module, rows in {
                "self_attention.linear_q_proj": 12,
                "self_attention.linear_q_down_proj": 3,
                "self_attention.linear_kv_down_proj": 5,
                "self_attention.linear_qkv_down_proj": 9,  # more rows than columns, and still
                "cross_attention.linear_q": 12,
                "cross_attention.linear_kv": 24,
            }.items()
        ],
    ],
)
def test_the_residual_side_is_rotated(name, shape, parts):
    """Rows after orientation are the residual dimension (8) for every weight of the table."""
    placement = placed(name, *shape)
    assert {x.name.partition("#")[2]: x.shape for x in placement.matrices} == parts
    assert placement.note == ""


@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
def test_fused_experts_are_one_matrix_each(name):
    """[experts, rows, columns] splits by expert first, then as each expert's own weight does."""
    shape = (3, 2 * FFN, HIDDEN) if name == "linear_fc1" else (3, HIDDEN, FFN)
    matrices = placed(LAYER + f"mlp.experts.{name}.weight", *shape).matrices
    assert [x.shape for x in matrices] == [(8, 12)] * (6 if name == "linear_fc1" else 3)
    assert len({x.name for x in matrices}) == len(matrices)


def test_gated_attention_splits_into_four():
    """Q, its gate, K and V, in the order in which Megatron stores a query group."""
    gated = SimpleNamespace(**{**vars(MODEL), "attention_output_gate": True})
    placement = placed(
        LAYER + "self_attention.linear_qkv.weight", QKV + HEADS * HEAD, HIDDEN, model=gated
    )
    q, gate, k, v = placement.matrices
    assert (q.intervals[0], gate.intervals[0], k.intervals[0], v.intervals[0]) == (
        (0, 6),
        (6, 12),
        (12, 15),
        (15, 18),
    )


def test_not_gated_fc1_is_one_matrix():
    """Without a gate there is nothing to split."""
    plain = SimpleNamespace(**{**vars(MODEL), "gated_linear_unit": False})
    assert [
        x.shape for x in placed(LAYER + "mlp.linear_fc1.weight", FFN, HIDDEN, model=plain).matrices
    ] == [(8, 12)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding.word_embeddings.weight", (32, HIDDEN)),
        ("embedding.position_embeddings.weight", (16, HIDDEN)),
        ("output_layer.weight", (32, HIDDEN)),
        ("decoder.final_layernorm.weight", (HIDDEN,)),
        (LAYER + "mlp.linear_fc1.bias", (FFN,)),
        (LAYER + "mixer.conv1d.weight", (8, 1, 4)),
    ],
)
def test_vocabulary_and_vectors_stay_with_adamw(name, shape):
    """Hybrid mode: no logical matrices."""
    assert placed(name, *shape).matrices == ()


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("self_attention.linear_q_proj", "chain.3"),
        ("self_attention.linear_q_down_proj", "chain.3"),
        ("self_attention.linear_qkv_down_proj", "chain.3"),
        ("cross_attention.linear_q", "chain.3"),
        ("cross_attention.linear_kv", ""),  # of the encoder's stream, which no group is of
    ],
)
def test_projections_of_latent_and_cross_attention_share(module, group):
    """What reads the stream that enters the layer is in its group, fused or not."""
    (matrix,) = placed(f"{LAYER}{module}.weight", 6, HIDDEN, aro={"sharing": "chain"}).matrices
    assert matrix.group == group


def test_a_fused_latent_projection_is_one_matrix_over_tensor_parallelism():
    """Whose columns are in the order of ranks: q of the first, kv of the first, q of the second."""
    cut = {"tensor_model_parallel": True, "partition_dim": 0}
    name = LAYER + "self_attention.linear_qkv_down_proj.weight"
    placement = placed(name, 5, HIDDEN, tp=2, **cut)
    (matrix,) = placement.matrices
    assert matrix.shape == (HIDDEN, 10) and matrix.intervals == ((0, 10),)
    held = [part.rows for part in geometry.parts(matrix, placement.layout)]
    assert held == [(0, 5), (5, 10)]


def test_the_embedding_attribute_counts_whatever_the_name():
    """Megatron marks vocabulary weights; a model with other names is still right."""
    assert placed("tok.weight", 32, HIDDEN, is_embedding_or_output_parameter=True).matrices == ()


@pytest.mark.parametrize(("shape", "expected"), [((5, 9), (5, 9)), ((9, 5), (5, 9))])
def test_unknown_matrices_rotate_the_smaller_side_and_say_so(shape, expected):
    """A 2-D weight that the table does not know is not guessed at silently."""
    placement = placed(LAYER + "self_attention.linear_kv_up_proj.weight", *shape)
    assert placement.matrices[0].shape == expected
    assert "smaller side" in placement.note


@pytest.mark.parametrize(
    ("orientation", "shape"), [("left", (12, 8)), ("right", (8, 12)), ("min-side", (8, 12))]
)
def test_orientation_rules_override_the_table(orientation, shape):
    """left, right and min-side ignore the residual rule."""
    fc1 = LAYER + "mlp.linear_fc1.weight"
    matrices = placed(fc1, 2 * FFN, HIDDEN, aro={"orientation": orientation}).matrices
    assert [x.shape for x in matrices] == [shape] * 2


PROJ = LAYER + "self_attention.linear_proj.weight"
FUSED = LAYER + "self_attention.linear_qkv.weight"
TALL = HEADS * HEAD  # of proj, as stored


@pytest.mark.parametrize(
    ("override", "shape"),
    [
        ("*.linear_proj.weight=right", (TALL, HIDDEN)),
        ("decoder.layers.3.*=right", (TALL, HIDDEN)),
        ("decoder.layers.4.*=right", (HIDDEN, TALL)),
        ("*=left,*.linear_proj.weight=right", (HIDDEN, TALL)),  # the first that fits decides
        ("linear_proj=right", (HIDDEN, TALL)),  # a whole name
        ("*.linear_proj.weight=min-side", (HIDDEN, TALL)),
        ("*.linear_proj.weight=residual", (HIDDEN, TALL)),
    ],
)
def test_exceptions_by_name(override, shape):
    """They come before --aro-orientation, in their order."""
    (matrix,) = placed(PROJ, HIDDEN, TALL, aro={"override": override}).matrices
    assert matrix.shape == shape


def test_an_exception_for_a_part():
    """V alone is turned; a rule for the weight holds for all of its parts."""
    turned = {"override": "*.linear_qkv.weight#v=left,*.linear_qkv.weight=right"}
    q, k, v = placed(FUSED, QKV, HIDDEN, aro=turned).matrices
    assert (q.transposed, k.transposed, v.transposed) == (True, True, False)


def test_an_exception_sends_a_parameter_to_adamw():
    """A router, and nothing else; its shape is still known."""
    aro = {"override": "*.router.weight=adamw"}
    placement = placed(LAYER + "mlp.router.weight", 5, HIDDEN, aro=aro)
    assert placement.matrices == () and placement.shape == (5, HIDDEN)
    assert placed(PROJ, HIDDEN, TALL, aro=aro).matrices


@pytest.mark.parametrize(
    ("split", "qkv", "fc1"),
    [("none", 1, 1), ("qkv", 3, 1), ("gate-up", 1, 2), ("gate-up,qkv", 3, 2)],
)
def test_what_is_not_split_is_one_matrix(split, qkv, fc1):
    """With all rows of the parameter, in the parameter's name; experts stay apart."""
    aro = {"split": split}
    whole = placed(FUSED, QKV, HIDDEN, aro=aro).matrices
    assert len(whole) == qkv and sum(x.rows for x in whole) == QKV
    assert (whole[0].name == FUSED) == (qkv == 1)
    assert len(placed(LAYER + "mlp.linear_fc1.weight", 2 * FFN, HIDDEN, aro=aro).matrices) == fc1
    experts = placed(LAYER + "mlp.experts.linear_fc1.weight", 3, 2 * FFN, HIDDEN, aro=aro)
    assert len(experts.matrices) == 3 * fc1


def test_gate_and_up_as_one_matrix_do_not_go_with_tensor_parallelism():
    """A rank stores a stretch of each: said, with the way out."""
    cut = {"tensor_model_parallel": True, "partition_dim": 0}
    fc1 = (LAYER + "mlp.linear_fc1.weight", FFN, HIDDEN)
    with pytest.raises(ValueError, match="--aro-split without gate-up.*or do without"):
        placed(*fc1, aro={"split": "qkv"}, tp=2, **cut)
    assert len(placed(*fc1, tp=2, **cut).matrices) == 2


@pytest.mark.parametrize("weight", ["mixer.in_proj", "self_attention.linear_qkv_down_proj"])
def test_joined_projections_keep_nothing_by_row_under_tensor_parallelism(weight):
    """Ranks have stretches of Mamba's five projections or of latent attention's two, whose order
    changes with TP: nothing stored may."""
    cut = {"tensor_model_parallel": True, "partition_dim": 0}
    name = LAYER + weight + ".weight"
    way_out = rf"each of its projections.*\*\.{weight.split('.')[1]}\.weight=adamw"
    for aro in ({"projection": "adam"}, {"orientation": "left"}):
        with pytest.raises(ValueError, match=way_out):
            placed(name, 10, HIDDEN, aro=aro, tp=2, **cut)
        assert placed(name, 20, HIDDEN, aro=aro).matrices
    assert placed(name, 10, HIDDEN, tp=2, **cut).matrices[0].shape == (HIDDEN, 20)


def test_exceptions_that_fit_nothing():
    """A matrix counts, its parameter too; adamw needs a parameter, a rule something ARO steps."""
    overrides = {
        "*.linear_proj.weight=left": True,
        "*.linear_qkv.weight=left": True,
        "*#v=left": True,
        "*v=left": True,
        "*v=adamw": False,
        "*.router.weight=left": False,
        "*.linear_qkv.weight=adamw": True,
        "embedding.*=adamw": False,
    }
    for override, fits in overrides.items():
        aro = AROConfig(override=override)
        of = [placed(PROJ, HIDDEN, TALL, aro={"override": override})]
        of.append(placed(FUSED, QKV, HIDDEN, aro={"override": override}))
        left = unused(aro, ((x.name, x.matrices) for x in of))
        assert (not left) == fits, override
        if not fits:
            pattern, _, rule = override.partition("=")
            with pytest.raises(ValueError, match=re.escape(f"--aro-override {override} fits no")):
                check_used({pattern: rule})


def test_a_weight_that_does_not_split_as_configured_is_refused():
    """A QKV weight with more rows than the configuration's groups is an error, not a guess."""
    with pytest.raises(ValueError, match="linear_qkv"):
        placed(LAYER + "self_attention.linear_qkv.weight", QKV + 1, HIDDEN)


def test_wrapper_prefixes_do_not_enter_names():
    """DDP and Float16Module each add "module."."""
    assert canonical_name("module.module.decoder.x") == "decoder.x"


def test_the_table_has_one_line_for_all_layers_and_experts():
    """Layer and expert numbers fold into a star, with the count."""
    names = [
        f"decoder.layers.{i}.mlp.experts.linear_fc2.weight{j}" for i in range(2) for j in range(3)
    ]
    rows = placement_table([placed(name, HIDDEN, FFN) for name in names])
    assert rows[1:] == [
        ("decoder.layers.*.mlp.experts.linear_fc2.weight*", "6", "8x12", "ARO", "rows", "-")
    ]
