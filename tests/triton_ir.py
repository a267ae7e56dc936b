"""What Pallas hands to Triton, checked without a GPU by Triton's own rules of its dialect."""

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect


def triton_kernels(lowered: jax.stages.Lowered) -> list[ir.Module]:
    """The Triton modules of what was lowered for CUDA, verified: raises MLIRError for one that
    Triton would refuse, as lowering itself does not."""
    found: list[ir.Module] = []

    def visit(operation: ir.Operation) -> None:
        attributes = operation.attributes
        if "call_target_name" in attributes and "triton" in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            code = {entry.name: entry.attr for entry in config}["ir"]
            with ir.Context() as context:
                dialect.register_dialect(context)
                found.append(ir.Module.parse(ir.StringAttr(code).value_bytes))
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found
