// What a constant of a variant says of an option that calls may have: none has it, all have, or the
// kernel asks at run time (kernels_cu/__init__.py: EITHER).
enum Presence { kNever, kAlways, kEither };
