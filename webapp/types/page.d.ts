// Elements of a page come from its template, which no type checker reads. Look-ups return `any`.

interface ParentNode {
  querySelector(selectors: string): any;
  querySelectorAll(selectors: string): NodeListOf<any>;
}

interface Element {
  closest(selectors: string): any;
}

interface Document {
  getElementById(id: string): any;
}

/** htmx, which a script element of the page loads. */
declare const htmx: any;
