// Build fakedist/report/page/plotly: one minified file, compressed, and the licences of all that is in it.
//
// The same versions (package-lock.json) give the same bytes.

import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { constants, gzipSync } from 'node:zlib';
import { build } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, '../../fakedist/report/page/plotly');
const version = JSON.parse(readFileSync(join(here, 'node_modules/plotly.js/package.json'))).version;

const built = await build({
  absWorkingDir: here,
  entryPoints: ['entry.cjs'],
  bundle: true,
  minify: true,
  write: false,
  outdir: 'out',
  metafile: true,
  format: 'iife',
  globalName: 'Plotly',
  target: 'es2022',
  define: { global: 'window', 'define.amd': 'false' },
  legalComments: 'none',
  banner: {
    js: `/* plotly.js ${version}, Copyright 2012-2026 Plotly, Inc., MIT License; a bundle of some of its parts made by fakedist */`,
  },
});

const script = built.outputFiles.find(({ path }) => path.endsWith('.js'));
const packed = gzipSync(script.contents, { level: constants.Z_BEST_COMPRESSION });
packed[9] = 255; // the operating system that compressed it
writeFileSync(join(target, 'plotly.min.js.gz'), packed);

// The packages whose code is in the file, not those that only lent it a style sheet.
const used = new Set();
const output = Object.entries(built.metafile.outputs).find(([path]) => path.endsWith('.js'))[1];
for (const [path, { bytesInOutput }] of Object.entries(output.inputs)) {
  const found = /.*node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path);
  if (found && bytesInOutput) used.add(found[0]);
}
const licences = [...used].sort().map((folder) => {
  const about = JSON.parse(readFileSync(join(here, folder, 'package.json')));
  const name = readdirSync(join(here, folder)).find((each) => /^licen[cs]e(\.|$|-)/i.test(each));
  const text = name && existsSync(join(here, folder, name)) ? readFileSync(join(here, folder, name), 'utf8') : '';
  return `${about.name} ${about.version} (${about.license})\n\n${text.trim()}\n`;
});
writeFileSync(join(target, 'LICENSES.txt'), licences.join(`\n${'-'.repeat(80)}\n\n`));
console.log(
  `plotly.js ${version}: ${script.contents.length} bytes, compressed ${packed.length}, ${used.size} packages`,
);
