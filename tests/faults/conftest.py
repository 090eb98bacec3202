"""Adds scripts/ to the import path."""

import sys

from launchers import SCRIPTS

sys.path.append(str(SCRIPTS))
