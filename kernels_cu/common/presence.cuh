// Whether a variant's calls have an option: never, always, or decided at run time
// (cupykern/kernels.py: EITHER).
#pragma once
enum Presence { kNever, kAlways, kEither };
