import sys

from eagle_engine.cli import main

sys.exit(main())
