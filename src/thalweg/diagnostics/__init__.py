"""Is it as the theory says, and why does it train? Measurements on energies and on networks.

Curvature at a point; Jacobians of blocks and spans of time; gradients through depth and time; saturation; what weight
decay and normalisation do; whether a large-margin machine is at its optimum.
"""

from __future__ import annotations

from thalweg.diagnostics.costs import CostTable, LayerCost, cost_table
from thalweg.diagnostics.curvature import (
    ConvexConcave,
    Convexity,
    convex_concave_report,
    convexity,
)
from thalweg.diagnostics.decay import (
    DecayMeter,
    DecayReport,
    Shrinkage,
    measure_decay,
    shrinkage_by_rule,
)
from thalweg.diagnostics.gradient_flow import GradientFlow, LayerGradient, Site, gradient_flow
from thalweg.diagnostics.gradient_watch import GradientWatch
from thalweg.diagnostics.jacobians import (
    SingularValues,
    SpanReport,
    graph_jacobians,
    jacobian,
    jacobian_spectrum,
    span_spectra,
)
from thalweg.diagnostics.kkt import kkt_report
from thalweg.diagnostics.layer_names import MapLayer, map_layers
from thalweg.diagnostics.map_use import ChannelUse, LayerStretch, NormUse, channel_use, layer_stretches, norm_use
from thalweg.diagnostics.normalisation import (
    NormalisationReport,
    SchemeSummary,
    Statistics,
    compare_normalisations,
    layer_norm_jacobian,
    normalisation_statistics,
)
from thalweg.diagnostics.recurrences import (
    LinearRecurrence,
    VanishingBound,
    linear_recurrence,
    vanishing_bound,
)
from thalweg.diagnostics.saliency import (
    feature_maps,
    first_filters,
    grad_cam,
    heat,
    integrated_gradients,
    smooth_gradient,
)
from thalweg.diagnostics.saturation import Saturation, SaturationReport, saturation
from thalweg.diagnostics.unrolling import LayerTrace, unrolled

__all__ = [
    "ChannelUse",
    "ConvexConcave",
    "Convexity",
    "CostTable",
    "DecayMeter",
    "DecayReport",
    "GradientFlow",
    "GradientWatch",
    "LayerCost",
    "LayerGradient",
    "LayerStretch",
    "LayerTrace",
    "LinearRecurrence",
    "MapLayer",
    "NormUse",
    "NormalisationReport",
    "Saturation",
    "SaturationReport",
    "SchemeSummary",
    "Shrinkage",
    "SingularValues",
    "Site",
    "SpanReport",
    "Statistics",
    "VanishingBound",
    "channel_use",
    "compare_normalisations",
    "convex_concave_report",
    "convexity",
    "cost_table",
    "feature_maps",
    "first_filters",
    "grad_cam",
    "gradient_flow",
    "graph_jacobians",
    "heat",
    "integrated_gradients",
    "jacobian",
    "jacobian_spectrum",
    "kkt_report",
    "layer_norm_jacobian",
    "layer_stretches",
    "linear_recurrence",
    "map_layers",
    "measure_decay",
    "norm_use",
    "normalisation_statistics",
    "saturation",
    "shrinkage_by_rule",
    "smooth_gradient",
    "span_spectra",
    "unrolled",
    "vanishing_bound",
]
