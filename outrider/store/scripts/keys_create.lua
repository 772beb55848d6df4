-- KEYS: records (key id to JSON), revocations (key id to ms). ARGV: key id, JSON.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and known ~= ARGV[2] then
  return {'EXISTS'}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'OK'}
