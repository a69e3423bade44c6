"""The command `eagle` with FSDP on CPU processes, which torch can do and accelerate offers for GPUs alone. Start with torchrun."""

import sys

import accelerate.state
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

_init = accelerate.state.AcceleratorState.__init__


def _init_sharded(self, *args, **kwargs) -> None:
    _init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", state_dict_type="SHARDED_STATE_DICT")


if __name__ == "__main__":
    accelerate.state.AcceleratorState.__init__ = _init_sharded
    from eagle_engine.cli import main
    from eagle_engine.training import loop

    prepare = loop.Accelerator.prepare

    def prepare_sharded(self, *objects):
        prepared = prepare(self, *objects)
        assert all(type(p).__name__ == "DTensor" for p in prepared[0].parameters()), "the weights are not sharded"
        return prepared

    loop.Accelerator.prepare = prepare_sharded
    sys.exit(main(sys.argv[1:]))
