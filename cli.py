from cupykern.cli import main

raise SystemExit(main())
