"""Share the recorded run."""

from tests.support.recorded import recorded as recorded
