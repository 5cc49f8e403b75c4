"""Operations that are refused, each with the reason and what to do instead. A name may end or begin with a wildcard."""

from fnmatch import fnmatchcase

from .table import OPS

REFUSED: dict[str, str] = {}


def _refuse(names: str, reason: str) -> None:
    REFUSED.update(dict.fromkeys(names.split(), reason))


_refuse("LinalgCholeskyExBackward0 CholeskyBackward0 CholeskyInverseBackward0 LinalgLuBackward0 "
        "LinalgLuFactorExBackward0 LuUnpackBackward0 LinalgQrBackward0 GeqrfBackward0 OrmqrBackward0 "
        "LinalgHouseholderProductBackward0 LinalgEigBackward0 LinalgEighBackward0 LinalgSvdBackward0 "
        "LinalgDetBackward0 LinalgSlogdetBackward0 LinalgInvExBackward0 LinalgPinvBackward0 LinalgLstsqBackward0 "
        "LinalgMatrixExpBackward0",
        "a decomposition or function of a whole matrix has no shares by entry; compute it under torch.no_grad(), or "
        "explain the tensor that it makes")  # fmt: skip
_refuse("MkldnnRnnLayerBackward0 CudnnRnnBackward0 MiopenRnnBackward0 LstmMpsBackward0 ThnnFusedLstmCellBackward0 "
        "ThnnFusedGruCellBackward0",
        "a fused recurrent kernel hides its gates; call dynamiclrp.explain, which runs such layers as visible operations, or "
        "run the forward pass under dynamiclrp.recurrence.primitive_recurrence(model.modules())")  # fmt: skip
_refuse("CtcLossBackward0 CtcLossBackward1 CudnnCtcLossBackward0 CudnnCtcLossBackward1 MiopenCtcLossBackward0 "
        "MiopenCtcLossBackward1",
        "CTC sums over all alignments, which have no shares by frame; explain the logits that go into it")  # fmt: skip
_refuse("Sparse*Backward0 CoalesceBackward0 ToDenseBackward0 ToSparseBackward0 ToSparseBackward1 ToSparseBscBackward0 "
        "ToSparseBsrBackward0 ToSparseCscBackward0 ToSparseCsrBackward0 ValuesBackward0 ValuesBackward0_copy",
        "a sparse tensor has no place for what its zeros take; use dense tensors")  # fmt: skip
_refuse("NestedTensorFromTensorListBackward0 NestedTensorFromMaskBackward0 NestedFromPaddedBackward0 "
        "NestedViewFromBufferBackward0 NestedViewFromBufferBackward0_copy",
        "nested tensors of the strided layout have no shape; make them with layout=torch.jagged, or pad")  # fmt: skip
_refuse("ToMkldnnBackward0", "oneDNN's own memory layout cannot be read; leave the tensor dense")
_refuse("Foreach*Backward?", "it works on lists of tensors, as optimisers do; write it tensor by tensor")
_refuse("AcoshBackward1 AsinhBackward1 AtanhBackward1",
        "torch has no derivative of its in-place form; use the one that makes a new tensor")  # fmt: skip
_refuse("EmbeddingRenormBackward0 SpecialZetaBackward0 SpecialZetaBackward2 UniqueBackward0 Unique2Backward0 "
        "UniqueConsecutiveBackward0 UniqueDimBackward0 UniqueDimConsecutiveBackward0 NotImplemented",
        "torch has no derivative for it; keep it off the way from inputs to output")  # fmt: skip
_refuse("*BackwardBackward0 *BackwardDataBackward0 ConvolutionBackwardOverrideableBackward0 StandardGammaGradBackward0",
        "it belongs to the gradient of a gradient; explain the forward pass, not what create_graph=True made")  # fmt: skip
_refuse("DelayedError Error UndefinedGrad UndefinedGradBackward",
        "torch marks a result here that must not be differentiated; explain one that can be")  # fmt: skip
_refuse("SendRpcBackward", "the graph goes on in another process; explain the model in one")
_refuse("TestAutograd*Backward* TestWarnInAutogradBackward0", "it exists for torch's own tests")


def refusal(name: str) -> str | None:
    """Why a node type is refused; None if it is not.

    >>> refusal("LinalgSvdBackward0")[:17]
    'a decomposition o'
    """
    if name in OPS:  # a row of its own goes before a wildcard
        return None
    return REFUSED.get(name) or next((REFUSED[p] for p in REFUSED if "*" in p and fnmatchcase(name, p)), None)
