// A page without elements, for modules that read the page while they are imported. Import this file first.

globalThis.document ??= Object.assign(new EventTarget(), { getElementById: () => null });
globalThis.devicePixelRatio ??= 1;
