"""The run that these files are read of."""

from tests.support.recorded import recorded as recorded
