"""Twister2Flow's module `PipelineGraph`: the class of this name, whose graphs run themselves."""

from __future__ import annotations

from fastload import flow


class PipelineGraph(flow.PipelineGraph):
    """A graph of `fastload.flow`, with the method that Twister2Flow's programs call."""

    def execute(self) -> flow.Outcome:
        """Run the tasks. Raise the errors of `fastload.flow.run`."""
        return flow.run(self)
