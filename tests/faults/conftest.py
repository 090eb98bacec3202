"""Puts scripts/ where its modules can be imported."""

import sys

from launchers import SCRIPTS

sys.path.append(str(SCRIPTS))
