"""The names a traced custom loss may use, and nothing else.

Plain strings, no torch: an API process can refuse a graph without loading a tensor library. A
name is here when the operation is deterministic, leaves its operands alone, reads nothing but its
operands, and has an output whose size can be known before it is computed. So there is no random
number, no in-place method, no file, no autograd call, no half precision, and nothing that returns
as many tensors as a tensor is long.
"""

from __future__ import annotations

# Names that exist both as torch.NAME and as Tensor.NAME.
_SHARED = """
abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any argmax argmin argsort asin
asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_to ceil
clamp clamp_max clamp_min clip clone copysign cos cosh count_nonzero cummax cummin cumprod
cumsum deg2rad detach digamma div divide dot eq erf erfc erfinv exp exp2 expm1 fix flatten
flip floor floor_divide fmax fmin fmod frac gather ge greater greater_equal gt heaviside hypot
index_select inner isclose isfinite isinf isnan isneginf isposinf kthvalue le lerp less less_equal
lgamma log log10 log1p log2 logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or
logical_xor logit logsumexp lt masked_fill masked_select matmul max maximum mean median min minimum
mm movedim mul multiply mv nan_to_num nanmean nanmedian nansum narrow ne neg negative norm not_equal
numel outer permute positive pow prod quantile reciprocal relu remainder reshape roll round rsqrt
scatter scatter_add select sgn sigmoid sign signbit sin sinc sinh softmax log_softmax sort
sqrt square squeeze std sub subtract sum swapaxes t take take_along_dim tan tanh tile topk transpose
tril triu true_divide trunc unsqueeze var vdot where xlogy
""".split()

_TORCH_ONLY = """
arange atleast_1d cat concat concatenate cosine_similarity eye full full_like hstack linspace ones
ones_like rsub scalar_tensor stack std_mean var_mean vstack zeros zeros_like
""".split()

_METHOD_ONLY = """
bool contiguous dim double expand expand_as float int long new_full new_ones new_zeros repeat
reshape_as size to type_as unflatten view view_as
""".split()

_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity elu gelu hardtanh
huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid margin_ranking_loss mse_loss normalize
pad poisson_nll_loss relu relu6 selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin
softplus softsign tanh tanhshrink
""".split()

_SPECIAL = """
digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e i1 i1e log1p log_ndtr log_softmax
logit logsumexp ndtr ndtri round sinc softmax xlog1py xlogy
""".split()

_OPERATOR = """
abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub
truediv xor
""".split()

_MATH = """
acos asin atan atan2 ceil cos cosh degrees erf erfc exp exp2 expm1 fabs floor gamma hypot isfinite
isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc
""".split()

FUNCTIONS: frozenset[str] = frozenset(
    [f"torch.{name}" for name in (*_SHARED, *_TORCH_ONLY)]
    + [f"torch.nn.functional.{name}" for name in _FUNCTIONAL]
    + [f"torch.special.{name}" for name in _SPECIAL]
    + ["torch.linalg.norm", "torch.linalg.vector_norm", "torch.linalg.vecdot"]
    + [f"operator.{name}" for name in _OPERATOR]
    + [f"math.{name}" for name in _MATH]
    + ["getattr"]
)
METHODS: frozenset[str] = frozenset((*_SHARED, *_METHOD_ONLY))
ATTRIBUTES: frozenset[str] = frozenset("T device dtype indices layout mT ndim shape values".split())

_FACTORIES = "arange eye full linspace ones scalar_tensor zeros".split()
FACTORIES: frozenset[str] = frozenset(f"torch.{name}" for name in _FACTORIES)
"""Functions that make a tensor from numbers: they are told which device to make it on."""

_VIEWS = """
broadcast_to expand expand_as flatten full_like narrow new_full new_ones new_zeros ones_like permute
repeat reshape reshape_as select squeeze swapaxes t tile transpose unflatten unsqueeze view view_as
zeros_like cat concat concatenate hstack stack vstack movedim atleast_1d pad tril triu flip roll
"""
_CONVERSIONS = "bool contiguous dim double float int long size to type_as view view_as".split()

# How large an output can be, without asking torch: computing on shapes loads hundreds of modules
# for some operations. What is in none of these is asked of torch.
CONCATENATES: frozenset[str] = frozenset("cat concat concatenate hstack stack vstack".split())
MULTIPLIES: frozenset[str] = frozenset("inner outer quantile".split())
_ASKED = frozenset(
    """broadcast_to gather getitem index_select matmul mm pad scatter scatter_add take
    take_along_dim tile topk""".split()
)
_LIKE = "atleast_1d cosine_similarity full_like ones_like rsub std_mean var_mean zeros_like vecdot"
BROADCASTS: frozenset[str] = (
    frozenset((*_SHARED, *_OPERATOR, *_FUNCTIONAL, *_SPECIAL, *_CONVERSIONS, *_LIKE.split()))
    - _ASKED
    - CONCATENATES
    - MULTIPLIES
)
"""No output has more elements than the shape to which the operands broadcast."""

# What a step counts as work (`graph_cost`): nothing, one for each element, or a product. What is in
# none of these counts more for each element, so a name that is forgotten here is no way around; the
# slow ones were measured, forward and backward.
FREE: frozenset[str] = frozenset("dim getattr numel size".split())
PRODUCTS: frozenset[str] = frozenset("dot inner matmul mm mv outer vdot vecdot".split())
_POINTWISE = """
abs absolute add and_ bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp clamp_max
clamp_min clip clone contiguous copysign detach div divide double eq fix float floor floor_divide
floordiv fmax fmin ge greater greater_equal gt hardtanh int inv invert isfinite isinf isnan isneginf
isposinf l1_loss le lerp less less_equal logical_and logical_not logical_or logical_xor long lt
masked_fill maximum minimum mod mul multiply ne neg negative not_ not_equal or_ pos positive
reciprocal relu relu6 remainder round rsub sgn sign signbit sqrt square sub subtract to true_divide
truediv trunc type_as where xor nan_to_num leaky_relu
""".split()
REDUCTIONS: frozenset[str] = frozenset(
    """all amax amin any argmax argmin count_nonzero logsumexp max mean min nanmean nansum prod std
    sum var vector_norm""".split()
)
_NOT_SIMPLE = frozenset("argmax argmin l1_loss logsumexp mod prod remainder vector_norm".split())
SIMPLE: frozenset[str] = (
    REDUCTIONS | frozenset((*_POINTWISE, *_FACTORIES, *_VIEWS.split()))
) - _NOT_SIMPLE
SLOW: frozenset[str] = frozenset(
    """argsort digamma erfcx gammaln i0 i0e i1 i1e kthvalue lgamma log_ndtr logcumsumexp median
    nanmedian ndtri quantile sort topk""".split()
)
KEEPS: frozenset[str] = frozenset(
    """binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity huber_loss isclose
    kl_div l1_loss logsigmoid margin_ranking_loss mse_loss ndtr normalize poisson_nll_loss
    smooth_l1_loss soft_margin_loss softmin softsign tanhshrink vecdot""".split()
)
"""Several steps in one: autograd keeps values of theirs that are in no output. `KEPT` times the
shape of the operands is more than any of them was seen to keep."""
KEPT = 4
ELEMENTWISE: frozenset[str] = frozenset(
    (
        *(name for name in _POINTWISE if name != "l1_loss"),
        *"""acos acosh asin asinh atan atan2 atanh celu cos cosh deg2rad digamma elu erf erfc erfcx
        erfinv exp exp2 expit expm1 entr gammaln gelu hypot i0 i0e i1 i1e lgamma log log10 log1p
        log2 log_ndtr log_softmax logaddexp logaddexp2 logit logsigmoid ndtr ndtri pow rsqrt selu
        sigmoid silu sin sinc sinh softmax softmin softplus softsign tan tanh tanhshrink xlog1py
        xlogy cumsum cumprod logcumsumexp argsort flip roll tril triu""".split(),
    )
)
"""Operations whose output has the shape to which the operands broadcast."""

INDEXING: frozenset[str] = frozenset(
    "gather getitem index_select scatter scatter_add take take_along_dim".split()
)
"""Operations that read where an index tensor says: on a GPU a bad index would end the process."""

FORBIDDEN_KEYWORDS: frozenset[str] = frozenset(
    "generator names out pin_memory requires_grad".split()
)

DTYPES: frozenset[str] = frozenset("bool float32 float64 int32 int64".split())
LAYOUTS: frozenset[str] = frozenset(["strided"])
MEMORY_FORMATS: frozenset[str] = frozenset("contiguous_format preserve_format".split())

# torch.fx names a function after the module it was compiled into.
_ALIASES = (
    ("torch._C._nn.log_sigmoid", "torch.nn.functional.logsigmoid"),
    ("torch._C._nn.", "torch.nn.functional."),
    ("torch._C._special.special_", "torch.special."),
    ("torch._C._linalg.linalg_", "torch.linalg."),
    ("torch.functional.", "torch."),
    ("_operator.", "operator."),
    ("builtins.getattr", "getattr"),
)


def canonical(target: str) -> str:
    """The documented name of a function that torch.fx may have named after its home module."""
    for prefix, replacement in _ALIASES:
        if target.startswith(prefix):
            return replacement + target.removeprefix(prefix)
    return target
