"""Share the folder of recorded traces."""

from tests.support.traces import trace_folder as trace_folder
