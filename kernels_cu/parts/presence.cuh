// Whether calls of a variant have an option: never, always, or decided at run time
// (kernels_cu/__init__.py: EITHER).
enum Presence { kNever, kAlways, kEither };
