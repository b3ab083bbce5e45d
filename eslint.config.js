import js from "@eslint/js";
import globals from "globals";

export default [
  {
    ignores: [
      ...["webapp/static/vendor/", "webapp/static/unfold/", "webapp/types/"],
      ...["docs/", "manual/", "var/", "build/", "dist/", ".venv/"],
      "tests/screens/faults.js", // an expression, which Playwright evaluates
    ],
  },
  js.configs.recommended,
  {
    rules: {
      "no-control-regex": "off", // logs contain control characters
      "no-empty": ["error", { allowEmptyCatch: true }],
      "no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
      "no-var": "error",
      "prefer-const": "error",
      eqeqeq: "error",
    },
  },
  { files: ["webapp/static/js/**/*.js"], languageOptions: { globals: { ...globals.browser, htmx: "readonly" } } },
  { files: ["webapp/static/js/logs/finder.js"], languageOptions: { globals: globals.worker } },
  { files: ["tests/js/**/*.js"], languageOptions: { globals: { ...globals.nodeBuiltin, devicePixelRatio: "readonly" } } },
];
