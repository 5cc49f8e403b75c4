"""Operations whose derivative is zero everywhere: what comes out does not follow what goes in."""

from .table import Kind, row

C = Kind.CONSTANT

row("CeilBackward0 FloorBackward0 RoundBackward0 RoundBackward1 TruncBackward0 SignBackward0 DivBackward3", C)
row("EqBackward0 EqBackward1 GeBackward0 GeBackward1 GtBackward0 GtBackward1", C)
row("LeBackward0 LeBackward1 LtBackward0 LtBackward1 NeBackward0 NeBackward1", C)
row("FillBackward0 FillBackward2 ZeroBackward0", C)
row("FillBackward1 FillBackward3", Kind.MOVEMENT, fills=True)  # from a tensor, which may be live
row("BernoulliBackward0 BernoulliBackward1 BernoulliBackward2 CauchyBackward0 ExponentialBackward0", C)
row("GeometricBackward0 LogNormalBackward0 NormalBackward0 NormalBackward1 NormalBackward2 NormalBackward3", C)
row("PoissonBackward0 RandomBackward0 RandomBackward1 RandomBackward2 UniformBackward0", C)
